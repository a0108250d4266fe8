"""The profile of a run as its last event."""

from pathlib import Path
from typing import Any

from spanax.check.hlo import collectives
from spanax.check.lint import lint_profile, waived
from spanax.check.profile import profiled
from spanax.plan.plan import Plan
from spanax.run.profile import FOLDER, PROGRAM
from spanax.run.record.folder import CONFIG, PLAN, read_config
from spanax.show.source_text import source_text


def profile_event(run: Path) -> dict[str, Any]:
    """The summary of the profile in a run folder, as an event; communication by mesh axis, as its program has them,
    and what rules find in it that nobody allows.

    Raises:
      DataError: there is no trace in it.
    """
    folder, made, known = run / FOLDER, Plan.load(run / PLAN), None
    if (folder / PROGRAM).is_file():
        found = collectives((folder / PROGRAM).read_bytes(), made.mesh)
        known = {one.name: one.axes for one in found}
    summary = profiled(folder, axes=known)
    text = source_text(str(read_config(run / CONFIG).get("workload", "")))
    findings = waived(lint_profile(summary), text, made.allow)
    told = [one.to_json() for one in findings]
    return {"event": "profile", **summary.to_json(), "out": str(folder), "findings": told}
