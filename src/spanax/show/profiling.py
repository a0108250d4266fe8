"""The profile of a run as its last event."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spanax.check.profile import profiled
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Plan
from spanax.run.folder import PLAN
from spanax.run.profile import FOLDER, PROGRAM

Axes = Callable[[bytes, MeshShape], Mapping[str, str]]
"""Reads a serialized program: the mesh axes of each collective, by the name of its instruction."""


def profile_event(run: Path, axes_of: Axes | None = None) -> dict[str, Any]:
    """The summary of the profile in a run folder, as an event.

    Args:
      run: the run folder.
      axes_of: says over which mesh axes a collective goes; without it they are told apart by kind.

    Raises:
      DataError: there is no trace in it.
    """
    folder = run / FOLDER
    known = None
    if axes_of is not None and (folder / PROGRAM).is_file():
        known = axes_of((folder / PROGRAM).read_bytes(), Plan.load(run / PLAN).mesh)
    return {"event": "profile", **profiled(folder, axes=known).to_json(), "out": str(folder)}
