"""The checkpoints of a run in words, read without JAX."""

from dataclasses import asdict
from pathlib import Path

from spanax.documents import json_line
from spanax.entries.folder import Folder
from spanax.entries.kind import Kind
from spanax.errors import DataError
from spanax.printable import printable
from spanax.run.store import manifest, view
from spanax.units import bytes_text


def show(directory: Path, *, as_json: bool) -> tuple[str, list[str]]:
    """The steps saved in a folder, newest last, and what is wrong with any of them."""
    root = _root(directory)
    saved = view.describe(root)
    problems = [problem for step in saved for problem in step.problems]
    if as_json:
        return json_line({"directory": str(root), "steps": [asdict(step) for step in saved]}), problems
    lines = []
    for step in saved:
        state = ": ".join([step.state, *step.problems[:1]])
        line = f"step {step.step}  {bytes_text(step.bytes)}  {step.num_leaves} arrays  {step.when}  {state}"
        lines.append(printable(line))
    return "\n".join(lines) or f"no checkpoint in '{printable(root)}'", problems


def verify(directory: Path, *, as_json: bool) -> tuple[str, list[str]]:
    """Every file of every step held against its checksum; the problems name the file and what differs."""
    root = _root(directory)
    found = view.look(root)
    problems = view.differences(root, found)
    steps = sorted({one.step for one in found if one.state in ("good", "bad")})
    saving, unfinished = (
        [one.step for one in found if one.state == state and not one.problems] for state in (view.SAVING, "unfinished")
    )
    if as_json:
        listed = {"steps": steps, "saving": saving, "unfinished": unfinished, "problems": problems}
        return json_line({"directory": str(root), **listed}), problems
    more = f"; step {', '.join(map(str, saving))} is being saved" if saving else ""
    more += f"; step {', '.join(map(str, unfinished))} is unfinished" if unfinished else ""
    intact = f"{len(steps)} steps in '{printable(root)}', every file as it was saved{more}"
    return "\n".join(map(printable, problems)) or intact, problems


def _root(directory: Path) -> Folder:
    """The folder of steps: the one named, or the one in the run folder named."""
    root = manifest.steps_of_run(directory)
    if root.kind() is not Kind.FOLDER:
        raise DataError(f"there is no folder '{directory}'.", fix="a run folder, or its checkpoints folder")
    return root
