"""Check: the page of a certificate: what the rules found, and the plan's numbers beside XLA's."""

from spanax.check.certificate import Certificate
from spanax.check.finding import Finding, Severity
from spanax.check.hlo.collectives import Collective
from spanax.check.report import Report
from spanax.show.check import figure_rows, verdict
from spanax.show.page import plan as of_plan
from spanax.show.page.document import Page
from spanax.show.page.parts.bars import Bar
from spanax.show.page.parts.blocks import Block, Figure, findings_list
from spanax.show.page.parts.markup import Node, el
from spanax.show.page.parts.tables import table
from spanax.show.page.parts.traffic import traffic
from spanax.units import bytes_text

MOST = 500
"""So many collectives are listed, the largest."""


def check_page(told: Certificate) -> Page:
    """A certificate as a page."""
    report = told.report
    title = f"{report.layout} on {report.target} ({report.mesh})"
    said = verdict(report)
    return Page("check", title, f"{said[:1].upper()}{said[1:]}.", _figures(told), _blocks(told))


def _figures(told: Certificate) -> list[Figure]:
    report = told.report
    counts = [f"{sum(one.severity.value == name for one in told.findings)} {name}s" for name in ("error", "warning")]
    peak = report.compiled.peak_bytes or report.predicted.peak_bytes or 0
    limit = f"of {bytes_text(report.limit_bytes)} a device" if report.limit_bytes else "a device"
    moved = [sum(kinds.values()) for kinds in (report.compiled.collectives or {}).values()]
    return [
        Figure("findings", str(len(told.findings)), ", ".join(counts), any(map(_is_error, told.findings))),
        Figure("peak memory", bytes_text(peak), limit, report.fits is False),
        Figure("state a device", bytes_text(report.compiled.state_bytes or report.predicted.state_bytes or 0)),
        Figure("moved in a step", bytes_text(sum(moved)) if moved else "not told", "as compiled"),
        Figure("checked by", f"level {report.level}", report.by),
    ]


def _is_error(one: Finding) -> bool:
    return one.severity is Severity.ERROR


def _blocks(told: Certificate) -> list[Block]:
    report = told.report
    nothing = el("p", "No findings.", class_="note")
    found = [Block("Findings", [findings_list(told.findings) if told.findings else nothing])]
    heads = ("a device, a step", "predicted", f"compiled ({report.by})", "error")
    rows = [[*row] for row in figure_rows(report)]
    found.append(Block("Predicted against compiled", [table("predicted against compiled", heads, rows, {1, 2, 3})]))
    found.append(Block("Memory of a device", [_memory(told)]))
    sides = {"predicted": report.predicted.collectives, "compiled": report.compiled.collectives}
    known = {who: moved for who, moved in sides.items() if moved is not None}
    found.append(Block("Traffic by mesh axis", [traffic(known)], of_plan.TRAFFIC_NOTE))
    if report.collectives:
        found.append(Block("Collectives", [_collectives(report)], "The largest first; press a head to sort."))
    if report.buffers:
        rows = [[one.shapes, bytes_text(one.num_bytes), ", ".join(one.paths[:3])] for one in report.buffers]
        found.append(Block("The largest arrays", [table("the largest arrays", ("shape", "bytes", "like"), rows, {1})]))
    if told.plan is not None:
        found += of_plan.blocks(told.plan, is_priced=False)
    return found


def _memory(told: Certificate) -> Node:
    report = told.report
    price = told.plan.price if told.plan is not None else None
    predicted = price.memory if price is not None else _split(report.predicted.state_bytes, report.predicted.peak_bytes)
    bars = [Bar("predicted", predicted)]
    compiled = _split(report.compiled.state_bytes, report.compiled.peak_bytes)
    if compiled:
        bars.append(Bar("compiled", compiled))
    return of_plan.memory_bars(bars, report.limit_bytes)


def _split(state_bytes: int | None, peak_bytes: int | None) -> dict[str, int]:
    """The state, and all else at the fullest moment."""
    state = state_bytes or 0
    return {"state": state, "all else": max(0, (peak_bytes or 0) - state)} if peak_bytes else {}


def _collectives(report: Report) -> Node:
    heads = ("kind", "over", "bytes", "runs", "result", "for", "line")
    rows = [_row(one) for one in report.collectives[:MOST]]
    return table(f"{len(rows)} of {len(report.collectives)} collectives", heads, rows, {2, 3}, is_sorted=True)


def _row(one: Collective) -> list[Node | str]:
    short = one.shapes if len(one.shapes) < 40 else f"{one.shapes[:36]} ..."
    serves = ", ".join(one.tensors[:2]) + (f" +{len(one.tensors) - 2}" if len(one.tensors) > 2 else "")
    size = el("span", bytes_text(one.num_bytes), data_value=one.num_bytes)
    runs = f"{one.runs:,}" if one.is_counted else f"{one.runs:,} or more"
    return [one.kind, one.axes, size, runs, el("code", short), serves, "/".join(one.source.split("/")[-2:])]
