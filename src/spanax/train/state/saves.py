"""Saves the checkpoints of a run in the background; a failed save does not end the run."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from spanax.entries.folder import Folder, Place
from spanax.errors import DiskFullError, WriteError, first_line
from spanax.processes.processes import from_first
from spanax.train.config import TrainConfig
from spanax.train.data.batches import Batches
from spanax.train.record.telemetry import Telemetry
from spanax.train.run import Run
from spanax.train.store import manifest
from spanax.train.store.checkpoint import Pending

GRACE_SECONDS = 10.0
"""How long a run waits once for the previous save, because steps of a small model may be shorter than any save. After
that the disk counts as slow, and saves that fall due during another are skipped."""


@dataclass(eq=False)
class Saves:
    """Saves checkpoints into one folder, one at a time.

    Attributes:
      folder: the folder of all checkpoints.
      config: the settings; `keep` is the number of checkpoints to keep.
      telemetry: receives the events `save`, `save_failed` and `warning`.
      renew: called before each save to make the run folder again if it was removed.
      saved: the last saved step, or the first step of the run.
    """

    folder: Folder
    config: TrainConfig
    telemetry: Telemetry
    renew: Callable[[], Any]
    saved: int = 0
    _pending: Pending | None = None
    _skipped: list[int] = field(default_factory=list)
    _is_slow: bool = False
    _is_reported: bool = False
    _began: float = 0.0

    def start(self, run: Run, data: Batches) -> Pending | None:
        """Starts to save in the background; returns None if the previous save is still running or this one fails.

        A failure is reported, and the next due step is saved again.
        """
        if self._pending is not None and self._pending.is_running(0.0 if self._is_slow else GRACE_SECONDS):
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
        """Returns whether a step is saved or being saved."""
        return step == self.saved or (self._pending is not None and self._pending.step == step)

    def finish(self, run: Run, data: Batches) -> None:
        """Saves the newest state and waits until it is on disk; on a full disk, older checkpoints are removed.

        Raises:
          WriteError: it cannot be saved.
        """
        self._settle(run.num_steps)
        while self.saved != run.num_steps:
            try:
                self._save(run, data).wait()
                self.saved = run.num_steps
                self._pending = None
            except WriteError as error:
                self._pending = None
                if not self._failed(run.num_steps, error):
                    raise

    def _save(self, run: Run, data: Batches) -> Pending:
        self.renew()
        self._began = time.monotonic()
        self._pending = run.save(self.folder, data=data, keep=self.config.keep_last)
        blocked = time.monotonic() - self._began
        self.telemetry.report({"event": "save", "step": run.num_steps, "blocked_seconds": blocked})
        return self._pending

    def _settle(self, step: int) -> None:
        """Waits for the previous save, if any, and reports a failure and the saves skipped meanwhile."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.wait()
            self.saved = pending.step
        except WriteError as error:
            self._failed(pending.step, error)
        if self._skipped and not self._is_reported:
            self._is_reported = True
            step_seconds = (time.monotonic() - self._began) / max(1, step - pending.step)
            fits = math.ceil(pending.seconds / step_seconds)
            self.telemetry.warn(
                f"saving step {pending.step} took {pending.seconds:.1f} s, and saves due meanwhile were "
                f"skipped: step {', '.join(map(str, self._skipped))}. Use --save-every {fits}"
            )
        self._skipped.clear()

    def _failed(self, step: int, error: WriteError) -> bool:
        """Reports a failed save; on a full disk, removes the oldest checkpoint. Returns whether one was removed."""
        is_full = isinstance(error, DiskFullError)
        removed = from_first(lambda: str(make_room(self.folder) if is_full else None), WriteError)
        is_removed = removed != str(None)
        self.telemetry.report(
            {
                "event": "save_failed",
                "step": step,
                "reason": first_line(error),
                "removed": int(removed) if is_removed else None,
            }
        )
        return is_removed


def make_room(directory: Place) -> int | None:
    """Removes the oldest checkpoint and returns its step; None if the newest one is damaged or the only one."""
    checkpoints = manifest.finished(directory)
    if len({step for step, _ in checkpoints}) < 2 or manifest.problems(checkpoints[-1][1]):
        return None
    step, folder = checkpoints[0]
    with suppress(OSError):
        manifest.discard(folder)
        return step
    return None
