"""Displays values of Spanax as HTML in a notebook, with the parts of its pages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spanax.check.certificate import Certificate
from spanax.check.lint.subject import LintSubject
from spanax.check.report import Report
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidate import Candidate, Search
from spanax.plan.pipeline.ticks import Ticks
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement
from spanax.show.page import plan as of_plan
from spanax.show.page.check import check_page
from spanax.show.page.document import Page, fragment
from spanax.show.page.parts.bars import Bar
from spanax.show.page.parts.blocks import Block, Figure, facts, figures, section
from spanax.show.page.parts.markup import Inside, Node, el
from spanax.show.page.parts.mesh import mesh_grid
from spanax.show.page.parts.schedule_grid import schedule_grid
from spanax.show.page.parts.tables import table
from spanax.show.page.placement import spec_text
from spanax.show.page.search import HEADS, NUMBERS, search_rows
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.program import Program
from spanax.units import bytes_text, count_text, quantity_text

PRESS = "Click an array for its spec, its bytes, and the reason for its placement."
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
    return fragment(*SHOWN[type(value)](value))


def _page(page: Page) -> list[Node]:
    top = el("header", el("p", page.title, class_="title"), el("p", page.lead, class_="lead"))
    blocks = [replace(block, note=PRESS) if block.note == of_plan.POINT else block for block in page.blocks]
    return [top, figures(page.figures), *map(section, blocks)]


def _placement(leaf: Placement) -> list[Node]:
    local = f"{list(leaf.local_shape)}, {leaf.local_bytes:,} bytes ({bytes_text(leaf.local_bytes)})"
    shape = " ".join(f"{name or '?'} {size:,}" for name, size in zip(leaf.axes, leaf.shape, strict=True))
    details = facts(
        [("spec", el("code", spec_text(leaf))), ("dims", shape), ("per device", local), ("reason", leaf.reason)]
    )  # fmt: skip
    return [el("p", el("code", leaf.path), f" {leaf.dtype}, {leaf.kind}", class_="title"), details]


def _program(program: Program) -> list[Node]:
    state = sum(leaf.num_bytes for leaf in program.leaves)
    rows: list[list[Inside]] = [
        [axis.name, ", ".join(map(str, axis.sizes)), str(axis.ways), str(len(axis.leaves)), el("code", axis.leaves[0])]
        for axis in program.axes
    ]
    heads = ("axis", "sizes", "ways", "arrays", "for example")
    shown = [
        Figure("parameters", count_text(program.num_params), f"{len(program.leaves)} arrays of state"),
        Figure("state", bytes_text(state), "without replication"),
        *_step(program.step),
    ]
    return [figures(shown), section(Block("Axes", [table("axes", heads, rows, {2, 3})]))]


def _step(step: StepAnalysis) -> list[Figure]:
    ops = sum(1 for _ in step.graph.ops())
    coverage = Figure("sharded with the batch", f"{100 * step.axes.coverage:.0f} %", "of matmuls and convolutions")
    return [Figure("operations", f"{ops:,}", "per step"), coverage]


def _traced(step: StepAnalysis) -> list[Node]:
    rows = [
        [name, ", ".join(str(step.axes.ways[label]) for label in labels)]
        for name, labels in step.labels_by_name.items()
    ]
    return [figures(_step(step)), table("axes", ("axis", "ways"), rows, {1})]


def _search(search: Search) -> list[Node]:
    rows = [cells for cells, _ in search_rows(search)][:MAX_LAYOUTS]
    caption = f"{search.layouts_priced:,} layouts priced on {search.cluster}; the {len(rows)} fastest"
    best = [of_plan.step_bars([Bar("best", search.best.seconds)])] if search.best is not None else []
    return [el("p", caption, class_="title"), *best, table(caption, HEADS, rows, NUMBERS)]


def _candidate(candidate: Candidate) -> list[Node]:
    title = el("p", f"{candidate.layout} on {candidate.mesh}", class_="title")
    bars = [
        of_plan.step_bars([Bar("predicted", candidate.seconds)]),
        of_plan.memory_bars([Bar("predicted", candidate.memory)], None),
    ]
    return [title, *bars]


def _cluster(cluster: Cluster) -> list[Node]:
    chip = cluster.chip
    peak = ", ".join(
        f"{dtype} {quantity_text(rate, 'operations per second', 3)}" for dtype, rate in chip.peak_flops.items()
    )
    memory = bytes_text(cluster.memory_bytes) if cluster.memory_bytes else "unknown"
    pairs = [("devices", f"{cluster.num_devices:,} {chip.name}"), ("memory per device", memory), ("peak", peak)]
    return [el("p", str(cluster), class_="title"), facts(pairs)]


def _subject(subject: LintSubject) -> list[Node]:
    report = [] if subject.report is None else _page(check_page(Certificate(subject.report, (), subject.plan)))
    return report or _page(of_plan.plan_page(subject.plan))


SHOWN: dict[type, Callable[[Any], list[Node]]] = {
    Plan: lambda plan: _page(of_plan.plan_page(plan)),
    Placement: _placement,
    MeshShape: lambda mesh: [mesh_grid(mesh)],
    Program: _program,
    StepAnalysis: _traced,
    Search: _search,
    Candidate: _candidate,
    Cluster: _cluster,
    Report: lambda report: _page(check_page(Certificate(report))),
    Certificate: lambda certificate: _page(check_page(certificate)),
    LintSubject: _subject,
    Ticks: lambda ticks: [schedule_grid(ticks)],
}
"""By type, the function that displays a value."""
