"""The profile of a run as its last event."""

from pathlib import Path
from typing import Any

from spanax.check.hlo import collectives
from spanax.check.lint import lint_profile
from spanax.check.profile import profiled
from spanax.plan.plan import Plan
from spanax.run.folder import PLAN
from spanax.run.profile import FOLDER, PROGRAM


def profile_event(run: Path) -> dict[str, Any]:
    """The summary of the profile in a run folder, as an event; communication by mesh axis, as its program has them,
    and what rules find in it.

    Raises:
      DataError: there is no trace in it.
    """
    folder, known = run / FOLDER, None
    if (folder / PROGRAM).is_file():
        found = collectives((folder / PROGRAM).read_bytes(), Plan.load(run / PLAN).mesh)
        known = {one.name: one.axes for one in found}
    summary = profiled(folder, axes=known)
    findings = [one.to_json() for one in lint_profile(summary)]
    return {"event": "profile", **summary.to_json(), "out": str(folder), "findings": findings}
