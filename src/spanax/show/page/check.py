"""The page of a check: its text, its collectives, and its plan."""

from spanax.check.report import Report
from spanax.show.check import certificate_text, collectives_text
from spanax.show.page.document import Block, Page, text
from spanax.show.page.plan import plan_blocks


def check_page(report: Report) -> Page:
    """Returns the page of a report."""
    blocks = [Block("Check", [text("the check", certificate_text(report))])]
    if report.collectives:
        blocks.append(Block("Collectives", [text("collectives", collectives_text(report.collectives))]))
    if report.plan is not None:
        blocks += plan_blocks(report.plan)
    return Page("check", f"{report.layout} on {report.target} ({report.mesh})", blocks)
