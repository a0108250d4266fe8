"""The page of a check: findings, and predicted next to compiled figures."""

from collections import Counter
from collections.abc import Sequence

from spanax.check.certificate import Certificate
from spanax.check.finding import Finding
from spanax.check.hlo.collectives import Collective
from spanax.check.report import Figures, Report
from spanax.show.check import COLLECTIVE_HEADS, collective_cells, figure_rows, verdict
from spanax.show.page.document import Block, Cell, Fact, Page, Part, bars, table, text
from spanax.show.page.plan import array_blocks, sentence, traffic_block
from spanax.units import bytes_text

MAX_COLLECTIVES = 500
"""Number of collectives listed, the largest ones."""


def check_page(certificate: Certificate) -> Page:
    """Returns the page of a certificate."""
    report = certificate.report
    title = f"{report.layout} on {report.target} ({report.mesh})"
    return Page("check", title, sentence(verdict(report)), _facts(certificate), _blocks(certificate))


def findings_part(findings: Sequence[Finding]) -> Part:
    """Returns findings with their severity and fix."""
    rows = [
        (
            finding.severity.value,
            finding.code,
            finding.message,
            finding.fix,
            (bytes_text(finding.num_bytes) if finding.num_bytes else "", finding.num_bytes),
        )
        for finding in findings
    ]
    heads = ("severity", "code", "finding", "fix", "per device")
    return table("findings", heads, rows) if rows else text("findings", "No findings.")


def _facts(certificate: Certificate) -> list[Fact]:
    report = certificate.report
    counts = Counter(finding.severity.value for finding in certificate.findings)
    peak = report.compiled.peak_bytes or report.predicted.peak_bytes or 0
    room = f"of {bytes_text(report.limit_bytes)} per device" if report.limit_bytes else "per device"
    state = report.compiled.state_bytes or report.predicted.state_bytes or 0
    moved = [sum(kinds.values()) for kinds in (report.compiled.collectives or {}).values()]
    detail = ", ".join(f"{counts[name]} {name}{'s' * (counts[name] != 1)}" for name in ("error", "warning"))
    return [
        Fact("findings", f"{len(certificate.findings)}", detail, counts["error"] > 0),
        Fact("peak memory", bytes_text(peak), room, report.fits is False),
        Fact("state per device", bytes_text(state)),
        Fact("communication per step", bytes_text(sum(moved)) if moved else "unknown", "as compiled"),
        Fact("checked by", f"level {report.level}", report.by),
    ]


def _blocks(certificate: Certificate) -> list[Block]:
    report = certificate.report
    heads = ("per device, per step", "predicted", f"compiled ({report.by})", "error")
    sides = {"predicted": report.predicted.collectives, "compiled": report.compiled.collectives}
    blocks = [
        Block("Findings", [findings_part(certificate.findings)]),
        Block("Predicted and compiled", [table("predicted and compiled", heads, figure_rows(report))]),
        Block("Memory per device", [_memory(certificate)]),
        traffic_block({side: moved for side, moved in sides.items() if moved is not None}),
    ]
    if report.collectives:
        blocks.append(Block("Collectives", [_collectives(report)], "The largest first."))
    if report.buffers:
        rows = [
            (buffer.shapes, (bytes_text(buffer.num_bytes), buffer.num_bytes), ", ".join(buffer.paths[:3]))
            for buffer in report.buffers
        ]
        largest = table("the largest arrays", ("shape", "bytes", "shaped like"), rows)
        blocks.append(Block("The largest arrays", [largest]))
    return blocks + (array_blocks(certificate.plan) if certificate.plan is not None else [])


def _memory(certificate: Certificate) -> Part:
    report = certificate.report
    plan = certificate.plan
    predicted = _sizes(report.predicted) if plan is None or plan.price is None else plan.price.memory
    sides = {"predicted": predicted, "compiled": _sizes(report.compiled)}
    known = {side: sizes for side, sizes in sides.items() if sizes}
    return bars("bytes per device", known, bytes_text, report.limit_bytes)


def _sizes(figures: Figures) -> dict[str, int]:
    """Returns state and other bytes at peak memory."""
    state = figures.state_bytes or 0
    peak = figures.peak_bytes
    return {"state": state, "other": max(0, peak - state)} if peak else {}


def _collectives(report: Report) -> Part:
    rows = list(map(_collective_row, report.collectives[:MAX_COLLECTIVES]))
    return table(f"{len(rows)} of {len(report.collectives)} collectives", COLLECTIVE_HEADS, rows)


def _collective_row(collective: Collective) -> list[Cell]:
    kind, axes, result, runs, size, arrays, line = collective_cells(collective)
    runs_text = runs if collective.is_counted else f"{runs} or more"
    return [kind, axes, result, (runs_text, collective.runs), (size, collective.num_bytes), arrays, line]
