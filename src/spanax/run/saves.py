"""Saves: the checkpoints of a run as they fall due. One that fails costs itself, not the run."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanax.errors import WriteError
from spanax.run.checkpoint import Pending, is_full, make_room
from spanax.run.config import TrainConfig
from spanax.run.data import Batches
from spanax.run.run import Run


@dataclass(eq=False)
class Saves:
    """Saves into one folder, never two at once.

    Attributes:
      folder: the folder of all steps.
      config: how often is saved, and how many steps are kept.
      tell: takes the events `save`, `save_failed` and `warning`.
      renew: called before a save; makes the run folder again where somebody removed it.
    """

    folder: Path
    config: TrainConfig
    tell: Callable[[dict[str, Any]], None]
    renew: Callable[[], None] = lambda: None
    _going: Pending | None = None
    _began: float = 0.0
    _is_slow: bool = False

    def start(self, run: Run, data: Batches) -> None:
        """Save in the background, unless the save before is still going on; what fails is told of, and tried again
        when the next one is due."""
        if self._going is not None and self._going.is_running():
            self._tell_slow(run.num_steps)
            return
        self._settle()
        try:
            self._save(run, data)
        except WriteError as error:
            self._failed(run.num_steps, error)

    def finish(self, run: Run, data: Batches) -> None:
        """Save the last step, and wait until it is on disk; older steps make room for it where they must.

        Raises:
          WriteError: it cannot be saved.
        """
        self._settle()
        while True:
            try:
                self._save(run, data)
                self.wait()
                return
            except WriteError as error:
                self._going = None
                if self._failed(run.num_steps, error) is None:
                    raise

    def wait(self) -> None:
        """Wait for the save that goes on, if any.

        Raises:
          WriteError: it failed.
        """
        if self._going is not None:
            self._going.wait()

    def _save(self, run: Run, data: Batches) -> None:
        self.renew()
        self._began = time.monotonic()
        self._going = run.save(self.folder, data=data, keep=self.config.keep)
        blocked = time.monotonic() - self._began
        self.tell({"event": "save", "step": run.num_steps, "blocked_seconds": blocked})

    def _settle(self) -> None:
        """The end of the save before."""
        going, self._going = self._going, None
        try:
            if going is not None:
                going.wait()
        except WriteError as error:
            self._failed(going.step, error)

    def _failed(self, step: int, error: WriteError) -> int | None:
        """Tells of it, and removes the oldest step from a full disk; that step, where one could go."""
        removed = make_room(self.folder) if is_full(error) else None
        self.tell({"event": "save_failed", "step": step, "reason": str(error).splitlines()[0], "removed": removed})
        return removed

    def _tell_slow(self, step: int) -> None:
        if self._is_slow or self._going is None:
            return
        self._is_slow = True
        num_steps = step - self._going.step
        seconds = time.monotonic() - self._began
        self.tell({
            "event": "warning",
            "message": f"the checkpoint of step {self._going.step} is still being written after {seconds:.1f} s: step "
            f"{step} is not saved. --save-every {2 * num_steps} or more would fit",
        })  # fmt: skip
