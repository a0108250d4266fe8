"""Pages: what `spanax report` is given, recognised by what is in it, and its page."""

from pathlib import Path

from spanax.check.certificate import Certificate
from spanax.commands.check import report_text
from spanax.commands.report import Report, report, sections
from spanax.commands.report import report_text as run_text
from spanax.commands.requests import ReportCommand
from spanax.documents import json_line, parse_json, read_opened
from spanax.errors import DataError
from spanax.plan.plan import Plan
from spanax.show.page.check import check_page
from spanax.show.page.document import Page, write
from spanax.show.page.plan import plan_page
from spanax.show.page.run import run_page
from spanax.show.page.run_folder import run_record

KNOWN = "the folder of a run, or what spanax plan --out or spanax check --out wrote"


def answer(asked: ReportCommand) -> str:
    """What `spanax report` prints of a plan or a check, or of a run with a page; and the page, where it is wanted.

    Raises:
      DataError: it is none of these, or damaged.
      WriteError: the page cannot be written.
    """
    value = read(asked.run) if asked.run.is_file() else report(asked.run)
    lines = []
    if asked.out is not None:
        lines.append(write(page_of(value), asked.out))
    if asked.json:
        return json_line(value.to_json()) if isinstance(value, Report) else value.to_json()
    if isinstance(value, Plan):
        return "\n".join([*lines, str(value)])
    if isinstance(value, Certificate):
        return "\n".join([*lines, report_text(value.report), "", *map(str, value.findings)])
    return "\n".join([*lines, run_text(sections(value))])


def read(path: Path) -> Plan | Certificate:
    """The plan or the certificate in a file.

    Raises:
      DataError: it is neither, or cannot be read.
    """
    try:
        text = read_opened(path).text
        data = parse_json(text)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read '{path}'.", where=str(error), fix=KNOWN) from None
    keys = sorted(data) if isinstance(data, dict) else []
    if {"fingerprint", "leaves"} <= set(keys):
        return Plan.from_json(text)
    if {"predicted", "compiled"} <= set(keys):
        return Certificate.from_json(text)
    said = (
        f"it has {', '.join(map(repr, keys[:6])) or 'nothing in it'}" if isinstance(data, dict) else "it is no object"
    )
    raise DataError(f"'{path}' is neither a plan nor a check.", where=said, fix=KNOWN)


def page_of(value: Plan | Certificate | Report) -> Page:
    """The page of a plan, a check or a run."""
    if isinstance(value, Plan):
        return plan_page(value)
    return check_page(value) if isinstance(value, Certificate) else run_page(run_record(value))
