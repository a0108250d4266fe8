"""The checkpoints of a run in words, read without JAX."""

import json
from dataclasses import asdict
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.kind import Kind
from spanax.errors import DataError, plain
from spanax.run.store import manifest
from spanax.units import bytes_text


def show(directory: Path, *, as_json: bool) -> tuple[str, list[str]]:
    """The steps saved in a folder, newest last, and what is wrong with any of them."""
    root = _root(directory)
    saved = manifest.describe(root)
    problems = [problem for step in saved for problem in step.problems]
    if as_json:
        return json.dumps({"directory": str(root), "steps": [asdict(step) for step in saved]}, default=str), problems
    lines = []
    for step in saved:
        state = ": ".join([step.state, *step.problems[:1]])
        lines.append(f"step {step.step}  {bytes_text(step.bytes)}  {step.num_leaves} arrays  {step.when}  {state}")
    return plain("\n".join(lines)) or f"no checkpoint in '{root}'", problems


def verify(directory: Path, *, as_json: bool) -> tuple[str, list[str]]:
    """Every file of every step held against its checksum; the problems name the file and what differs."""
    root = _root(directory)
    problems = manifest.verify(root)
    steps = manifest.steps(root)
    if as_json:
        return json.dumps({"directory": str(root), "steps": steps, "problems": problems}), problems
    return plain("\n".join(problems)) or f"{len(steps)} steps in '{root}', every file as it was saved", problems


def _root(directory: Path) -> Folder:
    """The folder of steps: the one named, or the one in the run folder named."""
    root = manifest.steps_of_run(directory)
    if root.kind() is not Kind.FOLDER:
        raise DataError(f"there is no folder '{directory}'.", fix="a run folder, or its checkpoints folder")
    return root
