"""`spanax report`: reports on a run, a plan or a check, as text, JSON or an HTML page."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from spanax.commands.answer import Answer
from spanax.errors import FileError, FileErrors

if TYPE_CHECKING:
    from spanax.check.report import Report
    from spanax.plan.plan import Plan
    from spanax.show.page.document import Page
    from spanax.train.record.report import RunReport

EXPECTED = "a run folder, or a file written by spanax plan --out or spanax check --out"


@dataclass(frozen=True)
class ReportCommand:
    """Report the goodput of a run, its faults, and how to resume it; or draw a run, a plan or a check as an HTML page.

    Attributes:
      run: a run folder, also of a run in progress; or a file that spanax plan --out or spanax check --out wrote.
      out: write a self-contained HTML page with charts to this file: -o report.html.
      json: print one JSON object.
    """

    run: Positional[Path]
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    json: bool = False


def answer(command: ReportCommand) -> Answer:
    """Returns the report; writes the page, if requested.

    Raises:
      DataError: the path is none of a run, a plan and a check, or damaged.
      WriteError: the page cannot be written.
    """
    if not command.run.is_file():
        return _run_answer(command)
    from spanax.plan.plan import Plan
    from spanax.show.check import certificate_text

    value = read(command.run)
    text = str(value) if isinstance(value, Plan) else certificate_text(value)
    return Answer("\n".join([*_written(value, command.out), text]), value.to_json())


def _run_answer(command: ReportCommand) -> Answer:
    from spanax.show.report import report_text
    from spanax.train.record.report import run_report

    report = run_report(command.run)
    return Answer("\n".join([*_written(report, command.out), report_text(report)]), report.to_json())


def _written(value: "Plan | Report | RunReport", out: Path | None) -> list[str]:
    """Writes the page, if requested, and returns the line that reports it."""
    if out is None:
        return []
    from spanax.show.page.document import write

    return [write(page_of(value), out)]


def read(path: Path) -> "Plan | Report":
    """Returns the plan or the certificate in a file, identified by its keys.

    Raises:
      DataError: the file contains neither, or cannot be read.
    """
    from spanax.check.report import Report
    from spanax.documents import parse_json, read_opened
    from spanax.plan.plan import Plan

    with FileErrors(FileError, f"cannot read '{path}'.", fix=EXPECTED):
        text = read_opened(path)
        data = parse_json(text)
    keys = sorted(data) if isinstance(data, dict) else []
    if {"fingerprint", "leaves"} <= set(keys):
        return Plan.from_json(text)
    if {"predicted", "compiled"} <= set(keys):
        return Report.from_json(text)
    names = ", ".join(map(repr, keys[:6])) or "no keys"
    content = f"it has {names}" if isinstance(data, dict) else "it is not a JSON object"
    raise FileError(f"'{path}' is neither a plan nor a check.", where=content, fix=EXPECTED)


def page_of(value: "Plan | Report | RunReport") -> "Page":
    """Returns the page of a plan, a check or a run."""
    from spanax.check.measure.run_record import run_record
    from spanax.check.report import Report
    from spanax.plan.plan import Plan
    from spanax.show.page.check import check_page
    from spanax.show.page.plan import plan_page
    from spanax.show.page.run import run_page

    if isinstance(value, Plan):
        return plan_page(value)
    return check_page(value) if isinstance(value, Report) else run_page(run_record(value))
