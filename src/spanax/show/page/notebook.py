"""Displays values of Spanax as HTML in a notebook: each as a page in a frame."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spanax.check.certificate import Certificate
from spanax.check.lint.subject import LintSubject
from spanax.check.report import Report
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.advice.quotes import Quotes
from spanax.plan.candidate import Candidate, Search
from spanax.plan.pipeline.ticks import Ticks
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement
from spanax.show.page.check import check_page
from spanax.show.page.document import Block, Fact, Page, frame, table, text
from spanax.show.page.plan import cost_blocks, layouts_part, plan_page, quotes_page
from spanax.show.placement import axes_text, dims_text, spec_text
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


def _text_page(kind: str, title: str, content: str, facts: Sequence[Fact] = ()) -> Page:
    return Page(kind, title, "", facts, [Block(kind.capitalize(), [text(title, content)])])


def _placement(leaf: Placement) -> Page:
    facts = [
        Fact("spec", spec_text(leaf.spec), dims_text(leaf)),
        Fact("per device", bytes_text(leaf.local_bytes), f"{list(leaf.local_shape)}, {leaf.local_bytes:,} bytes"),
    ]
    return Page("array", leaf.path, f"{leaf.dtype}, {leaf.kind}. {leaf.reason}", facts)


def _mesh(mesh: MeshShape) -> Page:
    devices = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    return _text_page("devices", str(mesh), np.array2string(devices, threshold=MAX_DEVICES))


def _program(program: Program) -> Page:
    state = bytes_text(sum(leaf.num_bytes for leaf in program.leaves))
    facts = [
        Fact("parameters", count_text(program.num_params), f"{len(program.leaves)} arrays of state"),
        Fact("state", state, "without replication"),
    ]
    return _text_page("axes", "Program", axes_text(program), facts)


def _step(step: StepAnalysis) -> Page:
    num_ops = sum(1 for _ in step.graph.ops())
    share = f"{100 * step.axes.coverage:.0f} %"
    facts = [Fact("operations", f"{num_ops:,}", "per step"), Fact("sharded with the batch", share, "of matmul FLOPs")]
    rows = [
        (name, ", ".join(f"{step.axes.ways[label]}" for label in labels))
        for name, labels in step.labels_by_name.items()
    ]
    return Page("step", "Step", "", facts, [Block("Axes", [table("axes", ("axis", "ways"), rows)])])


def _search(search: Search) -> Page:
    layouts = Block("Layouts", [layouts_part(search, MAX_LAYOUTS)])
    return Page("layouts", f"{search.layouts_priced:,} layouts priced on {search.cluster}", "", (), [layouts])


def _candidate(candidate: Candidate) -> Page:
    title = candidate.title
    return Page("layout", title, "", (), cost_blocks(candidate.seconds, candidate.memory))


def _cluster(cluster: Cluster) -> Page:
    rates = cluster.chip.peak_flops.items()
    memory = bytes_text(cluster.memory_bytes) if cluster.memory_bytes else "unknown"
    facts = [
        Fact("devices", f"{cluster.num_devices:,}", cluster.chip.name),
        Fact("memory per device", memory),
        *(Fact(f"peak, {dtype}", quantity_text(rate, "operations per second", 3)) for dtype, rate in rates),
    ]
    return Page("devices", str(cluster), "", facts)


def _subject(subject: LintSubject) -> Page:
    if subject.report is None:
        return plan_page(subject.plan)
    return check_page(Certificate(subject.report, (), subject.plan))


SHOWN: dict[type, Callable[[Any], Page]] = {
    Plan: plan_page,
    Quotes: lambda quotes: quotes_page(quotes, "the program"),
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
    Ticks: lambda ticks: _text_page("schedule", ticks.schedule, ticks_text(ticks)),
}
"""By type, the function that returns the page of a value."""
