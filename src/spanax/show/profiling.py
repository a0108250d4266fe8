"""The profile of a run as its last event."""

from pathlib import Path
from typing import Any

from spanax.check.hlo import collectives
from spanax.check.profile import profiled
from spanax.plan.plan import Plan
from spanax.run.folder import PLAN
from spanax.run.profile import FOLDER, PROGRAM


def profile_event(run: Path) -> dict[str, Any]:
    """The summary of the profile in a run folder, as an event; communication by mesh axis, as its program has them.

    Raises:
      DataError: there is no trace in it.
    """
    folder, known = run / FOLDER, None
    if (folder / PROGRAM).is_file():
        found = collectives((folder / PROGRAM).read_bytes(), Plan.load(run / PLAN).mesh)
        known = {one.name: one.axes for one in found}
    return {"event": "profile", **profiled(folder, axes=known).to_json(), "out": str(folder)}
