"""Formats the checkpoints of a run as text and JSON, without JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from spanax.entries.folder import Folder
from spanax.printable import printable
from spanax.train.store.view import SavedStep
from spanax.units import bytes_text


def steps_text(root: Folder, steps: Sequence[SavedStep]) -> str:
    """Returns one line per saved step, with its size, state and first problem."""
    lines = []
    for step in steps:
        state = ": ".join([step.state, *step.problems[:1]])
        line = f"step {step.step}  {bytes_text(step.bytes)}  {step.num_leaves} arrays  {step.when}  {state}"
        lines.append(printable(line))
    return "\n".join(lines) or f"no checkpoint in '{printable(root)}'"


def steps_json(root: Folder, steps: Sequence[SavedStep]) -> dict[str, Any]:
    """Returns the object of `spanax checkpoint show --json`."""
    return {"directory": str(root), "steps": [asdict(step) for step in steps]}


def verified_text(root: Folder, listed: Mapping[str, Sequence[Any]]) -> str:
    """Returns the problems, or that every file matches its checksum.

    Args:
      root: the folder of checkpoints.
      listed: the lists of `spanax checkpoint verify --json`.
    """
    if listed["problems"]:
        return "\n".join(map(printable, listed["problems"]))
    saving, unfinished = (", ".join(map(str, listed[key])) for key in ("saving", "unfinished"))
    suffix = f"; step {saving} is being saved" if saving else ""
    suffix += f"; step {unfinished} is unfinished" if unfinished else ""
    return f"{len(listed['steps'])} steps in '{printable(root)}', every file matches its checksum{suffix}"
