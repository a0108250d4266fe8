"""The page of a check: its text, its collectives, and its plan."""

from spanax.check.certificate import Certificate
from spanax.show.check import certificate_text, collectives_text
from spanax.show.page.document import Block, Page, text
from spanax.show.page.plan import plan_blocks


def check_page(certificate: Certificate) -> Page:
    """Returns the page of a certificate."""
    report = certificate.report
    blocks = [Block("Check", [text("the check", certificate_text(certificate))])]
    if report.collectives:
        blocks.append(Block("Collectives", [text("collectives", collectives_text(report.collectives))]))
    if certificate.plan is not None:
        blocks += plan_blocks(certificate.plan)
    return Page("check", f"{report.layout} on {report.target} ({report.mesh})", blocks)
