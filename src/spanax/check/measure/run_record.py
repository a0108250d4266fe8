"""Reads what a run folder records of expected and measured performance: its report, curves, plan and profile."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from spanax.check.finding import Finding
from spanax.check.hlo.collectives import collectives
from spanax.check.lint.lint import lint_profile, source_text, without_allowed
from spanax.check.profile import StepProfile, read_profile, step_profile
from spanax.entries.folder import Folder
from spanax.entries.names import PROFILE, PROGRAM
from spanax.errors import DataError, EntryError, first_line
from spanax.plan.plan import Plan
from spanax.train.record.folder import recorded
from spanax.train.record.report import RunReport

Read = TypeVar("Read")


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run as recorded in its folder; `findings` are those of its profile, `notes` lists what could not be read."""

    report: RunReport
    plan: Plan | None
    profile: StepProfile | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def run_record(report: RunReport) -> RunRecord:
    """Returns the record of a run; a missing or damaged file becomes a note.

    Raises:
      EntryError: an entry of the folder is a link or has another unexpected type.
    """
    folder = report.folder
    notes = list(report.notes)
    plan = _read_or_note(Plan.of_run, folder, notes)
    has_profile = Folder.of(folder).kind(PROFILE) is not None
    profile = _read_or_note(read_profile, folder, notes) if has_profile else None
    for name, points in (("loss", report.metrics.loss), ("held-out loss", report.metrics.held_out)):
        if points.num_nonfinite:
            notes.append(f"{points.num_nonfinite:,} of {points.num_added:,} values of the {name} are not finite")
    findings = () if profile is None else tuple(lint_profile(profile))
    return RunRecord(report, plan, profile, findings, tuple(notes))


def _read_or_note(read: Callable[[Path], Read], folder: Path, notes: list[str]) -> Read | None:
    """Returns what `read` reads from a folder; None if it is missing or damaged, with a note."""
    try:
        return read(folder)
    except EntryError:
        raise
    except DataError as error:
        notes.append(first_line(error))
        return None


def profile_event(run: Path) -> dict[str, Any]:
    """Returns the `profile` event: step time by category, communication by mesh axis, and findings of lint rules.

    Raises:
      DataError: the folder contains no trace.
    """
    folder = Folder.of(run)
    plan = Plan.of_run(run)
    axes_by_name = None
    if folder.kind(PROGRAM) is not None:
        axes_by_name = {each.name: each.axes for each in collectives(folder.read(PROGRAM), plan.mesh)}
    summary = step_profile(run, axes=axes_by_name)
    source = source_text(str(recorded(run).get("workload", "")))
    findings = [finding.to_json() for finding in without_allowed(lint_profile(summary), source, plan.allow)]
    return {"event": "profile", **asdict(summary), "out": str(run / PROFILE), "findings": findings}
