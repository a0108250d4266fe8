"""The profile of a run as its last event."""

from pathlib import Path
from typing import Any

from spanax.check.hlo.collectives import collectives
from spanax.check.lint.lint import lint_profile, without_allowed
from spanax.check.measure.profile import step_profile
from spanax.commands.source_text import source_text
from spanax.entries.folder import Folder
from spanax.entries.names import PROFILE, PROGRAM
from spanax.plan.plan import Plan
from spanax.run.record.folder import recorded


def profile_event(run: Path) -> dict[str, Any]:
    """The summary of the profile in a run folder, as an event; communication by mesh axis, as its program has them,
    and what rules find in it that nobody allows.

    Raises:
      DataError: there is no trace in it.
    """
    place, made, known = Folder.of(run), Plan.of_run(run), None
    if place.kind(PROGRAM) is not None:
        found = collectives(place.read(PROGRAM), made.mesh)
        known = {one.name: one.axes for one in found}
    summary = step_profile(run, axes=known)
    text = source_text(str(recorded(run).get("workload", "")))
    findings = without_allowed(lint_profile(summary), text, made.allow)
    told = [one.to_json() for one in findings]
    return {"event": "profile", **summary.to_json(), "out": str(run / PROFILE), "findings": told}
