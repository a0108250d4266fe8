"""Displays values of Spanax as HTML in a notebook: each as a page in a frame."""

from collections.abc import Callable
from typing import Any

import numpy as np

from spanax.check.certificate import Certificate
from spanax.check.lint.subject import LintSubject
from spanax.check.report import Report
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidate import Candidate, Search
from spanax.plan.pipeline.ticks import Ticks
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement
from spanax.show.page.check import check_page
from spanax.show.page.document import Block, Fact, Page, bars, frame, table, text
from spanax.show.page.plan import dims_text, plan_page, seconds_text, spec_text
from spanax.show.page.search import layouts_part
from spanax.show.schedules import ticks_text
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.program import Program
from spanax.units import bytes_text, count_text, quantity_text

MAX_DEVICES = 256
"""Number of devices of the largest mesh that is shown in full."""

MAX_LAYOUTS = 20
"""Number of layouts of a search that are shown."""


def notebook(value: Any) -> str:
    """Returns a value as HTML.

    Raises:
      KeyError: the type has no display.

    Example:
      >>> import spanax
      >>> "fsdp" in notebook(spanax.MeshShape.of("fsdp=4,model=2"))
      True
    """
    return frame(SHOWN[type(value)](value))


def _placement(leaf: Placement) -> Page:
    rows = [
        ("spec", spec_text(leaf)),
        ("dims", dims_text(leaf)),
        ("per device", f"{list(leaf.local_shape)}, {leaf.local_bytes:,} bytes ({bytes_text(leaf.local_bytes)})"),
        ("reason", leaf.reason or "sharded as it is used"),
    ]
    facts = table("placement of the array", ("", ""), rows)
    return Page("array", leaf.path, f"{leaf.dtype}, {leaf.kind}", (), [Block("Placement", [facts])])


def _mesh(mesh: MeshShape) -> Page:
    devices = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    numbers = text("devices", np.array2string(devices, threshold=MAX_DEVICES))
    facts = [Fact(name, f"{size:,}") for name, size in mesh.axes]
    return Page("mesh", str(mesh), f"{mesh.size:,} devices", facts, [Block("Devices", [numbers])])


def _program(program: Program) -> Page:
    state = sum(leaf.num_bytes for leaf in program.leaves)
    rows = [
        (axis.name, ", ".join(map(str, axis.sizes)), f"{axis.ways}", f"{len(axis.leaves)}", axis.leaves[0])
        for axis in program.axes
    ]
    facts = [
        Fact("parameters", count_text(program.num_params), f"{len(program.leaves)} arrays of state"),
        Fact("state", bytes_text(state), "without replication"),
        *_step_facts(program.step),
    ]
    axes = table("axes", ("axis", "sizes", "ways", "arrays", "for example"), rows)
    return Page("program", "Program", "", facts, [Block("Axes", [axes])])


def _step_facts(step: StepAnalysis) -> list[Fact]:
    num_ops = sum(1 for _ in step.graph.ops())
    return [
        Fact("operations", f"{num_ops:,}", "per step"),
        Fact("sharded with the batch", f"{100 * step.axes.coverage:.0f} %", "of matmuls and convolutions"),
    ]


def _step(step: StepAnalysis) -> Page:
    rows = [
        (name, ", ".join(f"{step.axes.ways[label]}" for label in labels))
        for name, labels in step.labels_by_name.items()
    ]
    return Page("step", "Step", "", _step_facts(step), [Block("Axes", [table("axes", ("axis", "ways"), rows)])])


def _search(search: Search) -> Page:
    layouts = Block("Layouts", [layouts_part(search, MAX_LAYOUTS)])
    return Page("layouts", f"{search.layouts_priced:,} layouts priced on {search.cluster}", "", (), [layouts])


def _candidate(candidate: Candidate) -> Page:
    time = bars("predicted seconds per step", {"predicted": candidate.seconds}, seconds_text)
    memory = bars("predicted bytes per device", {"predicted": candidate.memory}, bytes_text)
    blocks = [Block("Step time", [time]), Block("Memory per device", [memory])]
    return Page("layout", f"{candidate.layout} on {candidate.mesh}", "", (), blocks)


def _cluster(cluster: Cluster) -> Page:
    chip = cluster.chip
    rates = [
        Fact(f"peak, {dtype}", quantity_text(rate, "operations per second", 3))
        for dtype, rate in chip.peak_flops.items()
    ]
    memory = bytes_text(cluster.memory_bytes) if cluster.memory_bytes else "unknown"
    facts = [Fact("devices", f"{cluster.num_devices:,}", chip.name), Fact("memory per device", memory), *rates]
    return Page("devices", str(cluster), "", facts)


def _subject(subject: LintSubject) -> Page:
    if subject.report is None:
        return plan_page(subject.plan)
    return check_page(Certificate(subject.report, (), subject.plan))


def _ticks(table: Ticks) -> Page:
    return Page("schedule", table.schedule, "", (), [Block("Schedule", [text("schedule", ticks_text(table))])])


SHOWN: dict[type, Callable[[Any], Page]] = {
    Plan: plan_page,
    Placement: _placement,
    MeshShape: _mesh,
    Program: _program,
    StepAnalysis: _step,
    Search: _search,
    Candidate: _candidate,
    Cluster: _cluster,
    Report: lambda report: check_page(Certificate(report)),
    Certificate: check_page,
    LintSubject: _subject,
    Ticks: _ticks,
}
"""By type, the function that returns the page of a value."""
