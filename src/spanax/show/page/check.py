"""Builds the page of a certificate: findings, and predicted next to compiled figures."""

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

MAX_COLLECTIVES = 500
"""Number of collectives listed, the largest ones."""


def check_page(certificate: Certificate) -> Page:
    """Returns the page of a certificate."""
    report = certificate.report
    title = f"{report.layout} on {report.target} ({report.mesh})"
    lead = verdict(report)
    return Page("check", title, f"{lead[:1].upper()}{lead[1:]}.", _figures(certificate), _blocks(certificate))


def _figures(certificate: Certificate) -> list[Figure]:
    report = certificate.report
    counts = [
        _counted(sum(finding.severity.value == name for finding in certificate.findings), name)
        for name in ("error", "warning")
    ]
    peak = report.compiled.peak_bytes or report.predicted.peak_bytes or 0
    limit = f"of {bytes_text(report.limit_bytes)} per device" if report.limit_bytes else "per device"
    moved = [sum(kinds.values()) for kinds in (report.compiled.collectives or {}).values()]
    return [
        Figure(
            "findings", str(len(certificate.findings)), ", ".join(counts), any(map(_is_error, certificate.findings))
        ),
        Figure("peak memory", bytes_text(peak), limit, report.fits is False),
        Figure("state per device", bytes_text(report.compiled.state_bytes or report.predicted.state_bytes or 0)),
        Figure("communication per step", bytes_text(sum(moved)) if moved else "unknown", "as compiled"),
        Figure("checked by", f"level {report.level}", report.by),
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _is_error(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR


def _blocks(certificate: Certificate) -> list[Block]:
    report = certificate.report
    none = el("p", "No findings.", class_="note")
    blocks = [Block("Findings", [findings_list(certificate.findings) if certificate.findings else none])]
    heads = ("per device, per step", "predicted", f"compiled ({report.by})", "error")
    rows = [[*row] for row in figure_rows(report)]
    blocks.append(Block("Predicted and compiled", [table("predicted and compiled", heads, rows, {1, 2, 3})]))
    blocks.append(Block("Memory per device", [_memory(certificate)]))
    sides = {"predicted": report.predicted.collectives, "compiled": report.compiled.collectives}
    known = {side: moved for side, moved in sides.items() if moved is not None}
    blocks.append(Block("Communication by mesh axis", [traffic(known)], of_plan.TRAFFIC_NOTE))
    if report.collectives:
        blocks.append(Block("Collectives", [_collectives(report)], "The largest first; click a header to sort."))
    if report.buffers:
        rows = [[buffer.shapes, bytes_text(buffer.num_bytes), ", ".join(buffer.paths[:3])] for buffer in report.buffers]
        blocks.append(
            Block("The largest arrays", [table("the largest arrays", ("shape", "bytes", "shaped like"), rows, {1})])
        )
    if certificate.plan is not None:
        blocks += of_plan.blocks(certificate.plan, is_priced=False)
    return blocks


def _memory(certificate: Certificate) -> Node:
    report = certificate.report
    price = certificate.plan.price if certificate.plan is not None else None
    predicted = price.memory if price is not None else _parts(report.predicted.state_bytes, report.predicted.peak_bytes)
    bars = [Bar("predicted", predicted)]
    compiled = _parts(report.compiled.state_bytes, report.compiled.peak_bytes)
    if compiled:
        bars.append(Bar("compiled", compiled))
    return of_plan.memory_bars(bars, report.limit_bytes)


def _parts(state_bytes: int | None, peak_bytes: int | None) -> dict[str, int]:
    """Returns state and other bytes at peak memory."""
    state = state_bytes or 0
    return {"state": state, "other": max(0, (peak_bytes or 0) - state)} if peak_bytes else {}


def _collectives(report: Report) -> Node:
    heads = ("kind", "mesh axes", "bytes", "runs per step", "result", "arrays", "line")
    rows = [_row(collective) for collective in report.collectives[:MAX_COLLECTIVES]]
    return table(f"{len(rows)} of {len(report.collectives)} collectives", heads, rows, {2, 3}, is_sorted=True)


def _row(collective: Collective) -> list[Node | str]:
    short = collective.shapes if len(collective.shapes) < 40 else f"{collective.shapes[:36]} ..."
    tensors_text = ", ".join(collective.tensors[:2]) + (
        f" +{len(collective.tensors) - 2}" if len(collective.tensors) > 2 else ""
    )
    size = el("span", bytes_text(collective.num_bytes), data_value=collective.num_bytes)
    runs = f"{collective.runs:,}" if collective.is_counted else f"{collective.runs:,} or more"
    return [
        collective.kind,
        collective.axes,
        size,
        runs,
        el("code", short),
        tensors_text,
        "/".join(collective.source.split("/")[-2:]),
    ]
