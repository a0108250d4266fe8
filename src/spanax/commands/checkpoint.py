"""`spanax checkpoint`: lists and verifies the checkpoints of a run, without JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.errors import MissingFileError
from spanax.printable import printable
from spanax.units import bytes_text

if TYPE_CHECKING:
    from spanax.entries.folder import Folder
    from spanax.train.store.view import SavedStep


@dataclass(frozen=True)
class CheckpointCommand:
    """List or verify checkpoints without starting JAX.

    Attributes:
      action: show lists the steps; verify compares every file with its checksum, and exits with 65 if any differs.
      directory: the folder of checkpoints, or a run folder.
      json: print one JSON object.
    """

    action: Positional[Literal["show", "verify"]]
    directory: Positional[Path]
    json: bool = False


def answer(command: CheckpointCommand) -> Answer:
    """Returns the saved steps, or the result of verification.

    Raises:
      DataError: there is no such folder.
    """
    return show(command.directory) if command.action == "show" else verify(command.directory)


def show(directory: Path) -> Answer:
    """Returns the saved steps, newest last, each with its first problem."""
    from spanax.train.store import view

    root = _root(directory)
    steps = view.describe(root)
    data = {"directory": str(root), "steps": [asdict(step) for step in steps]}
    return Answer(steps_text(root, steps), data, is_styled=True)


def verify(directory: Path) -> Answer:
    """Compares every file of every step with its checksum; the problems name the file and the difference."""
    from spanax.train.store import view

    root = _root(directory)
    seen = view.describe(root)
    problems = view.verify(root, seen)
    steps = sorted({step.step for step in seen if step.state in ("good", "bad")})
    saving, unfinished = (
        [step.step for step in seen if step.state == state and not step.problems]
        for state in (view.SAVING, "unfinished")
    )
    listed: dict[str, list[Any]] = {"steps": steps, "saving": saving, "unfinished": unfinished, "problems": problems}
    data = {"directory": str(root), **listed}
    return Answer(verified_text(root, listed), data, exit_code=65 if problems else 0, is_styled=True)


def _root(directory: Path) -> "Folder":
    """Returns the folder of checkpoints: the one named, or that of the run folder named."""
    from spanax.entries.kind import Kind
    from spanax.train.store import manifest

    root = manifest.steps_of_run(directory)
    if root.kind() is not Kind.FOLDER:
        raise MissingFileError(f"there is no folder '{directory}'.", fix="a run folder, or its checkpoints folder")
    return root


def steps_text(root: "Folder", steps: "Sequence[SavedStep]") -> str:
    """Returns one line per saved step, with its size, state and first problem."""
    lines = []
    for step in steps:
        state = ": ".join([step.state, *step.problems[:1]])
        line = f"step {step.step}  {bytes_text(step.bytes)}  {step.num_leaves} arrays  {step.when}  {state}"
        lines.append(printable(line))
    return "\n".join(lines) or f"no checkpoint in '{printable(root)}'"


def verified_text(root: "Folder", listed: Mapping[str, Sequence[Any]]) -> str:
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
