"""Summarizes the profile in a run folder as the last event of the run."""

from pathlib import Path
from typing import Any

from spanax.check.hlo.collectives import collectives
from spanax.check.lint.lint import lint_profile, source_text, without_allowed
from spanax.check.profile import step_profile
from spanax.entries.folder import Folder
from spanax.entries.names import PROFILE, PROGRAM
from spanax.plan.plan import Plan
from spanax.train.record.folder import recorded


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
    return {"event": "profile", **summary.to_json(), "out": str(run / PROFILE), "findings": findings}
