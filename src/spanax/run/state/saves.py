"""Saves: the checkpoints of a run as they fall due. One that fails costs itself, not the run."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from spanax.entries.folder import Folder, Place
from spanax.errors import DiskFullError, WriteError
from spanax.run.config import TrainConfig
from spanax.run.data.batches import Batches
from spanax.run.distributed.processes import from_first
from spanax.run.record.telemetry import Telemetry
from spanax.run.run import Run
from spanax.run.store import manifest
from spanax.run.store.checkpoint import Pending

GRACE_SECONDS = 10.0
"""So long a run waits for the save before, once: steps of a small model may be shorter than any save. Then the disk is
slow, and no step waits for it again."""


@dataclass(eq=False)
class Saves:
    """Saves into one folder, never two at once.

    Attributes:
      folder: the folder of all steps.
      config: how often is saved, and how many steps are kept.
      telemetry: receives the events `save`, `save_failed` and `warning`.
      renew: called before a save; makes the run folder again where somebody removed it.
      saved: the step that was saved last, or that the run began with.
    """

    folder: Folder
    config: TrainConfig
    telemetry: Telemetry
    renew: Callable[[], Any]
    saved: int = 0
    _going: Pending | None = None
    _skipped: list[int] = field(default_factory=list)
    _is_slow: bool = False
    _is_told: bool = False
    _began: float = 0.0

    def start(self, run: Run, data: Batches) -> Pending | None:
        """Save in the background; None where the save before still goes on after all, or this one cannot begin.

        A failure is told of, and the next step that is due is saved again.
        """
        if self._going is not None and self._going.is_running(0.0 if self._is_slow else GRACE_SECONDS):
            self._skipped.append(run.num_steps)
            self._is_slow = True
            return None
        self._settle(run.num_steps)
        try:
            return self._save(run, data)
        except WriteError as error:
            self._failed(run.num_steps, error)
            return None

    def covers(self, step: int) -> bool:
        """Whether a step is saved, or on its way to the disk."""
        return step == self.saved or (self._going is not None and self._going.step == step)

    def finish(self, run: Run, data: Batches) -> None:
        """See the newest state saved and on disk, and older steps go where the disk has no room for it.

        Raises:
          WriteError: it cannot be saved.
        """
        self._settle(run.num_steps)
        while self.saved != run.num_steps:
            try:
                self._save(run, data).wait()
                self.saved, self._going = run.num_steps, None
            except WriteError as error:
                self._going = None
                if not self._failed(run.num_steps, error):
                    raise

    def _save(self, run: Run, data: Batches) -> Pending:
        self.renew()
        self._began = time.monotonic()
        self._going = run.save(self.folder, data=data, keep=self.config.keep)
        blocked = time.monotonic() - self._began
        self.telemetry.report({"event": "save", "step": run.num_steps, "blocked_seconds": blocked})
        return self._going

    def _settle(self, step: int) -> None:
        """Wait for the end of the save before, if any, and tell what came of it."""
        going, self._going = self._going, None
        if going is None:
            return
        try:
            going.wait()
            self.saved = going.step
        except WriteError as error:
            self._failed(going.step, error)
        if self._skipped and not self._is_told:
            self._is_told = True
            step_seconds = (time.monotonic() - self._began) / max(1, step - going.step)
            fits = math.ceil(going.seconds / step_seconds)
            self.telemetry.warn(
                f"saving step {going.step} took {going.seconds:.1f} s, and what fell due meanwhile was not "
                f"saved: step {', '.join(map(str, self._skipped))}. --save-every {fits} would fit"
            )
        self._skipped.clear()

    def _failed(self, step: int, error: WriteError) -> bool:
        """Tell of it; on a full disk the oldest step goes, so that the next save has its room. Whether one went."""
        is_full = isinstance(error, DiskFullError)
        removed = from_first(lambda: str(make_room(self.folder) if is_full else None), WriteError)
        is_removed = removed != str(None)
        self.telemetry.report({
            "event": "save_failed",
            "step": step,
            "reason": str(error).splitlines()[0],
            "removed": int(removed) if is_removed else None,
        })  # fmt: skip
        return is_removed


def make_room(directory: Place) -> int | None:
    """Removes the oldest finished step of a full disk, and returns its number; None where none can go.

    The newest step stays, and goes on to be the one that a run is restored from: it is held against its manifest first.
    """
    found = manifest.finished(directory)
    if len({step for step, _ in found}) < 2 or manifest.problems(found[-1][1]):
        return None
    step, folder = found[0]
    with suppress(OSError):
        manifest.discard(folder)
        return step
    return None
