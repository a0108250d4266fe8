"""Heartbeats of a training loop of the user, for the supervisor of `spanax launch`."""

import atexit
import functools
import operator
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from spanax.errors import RangeError, UnknownNameError, nearest
from spanax.processes.processes import Hosts
from spanax.processes.supervision import attach_supervisor
from spanax.train.record.heartbeat import FOLDER_VARIABLE, Pulse

PHASES = ("step", "save", "evaluate", "restore", "end")


@dataclass
class LoopPulse:
    """Writes the heartbeats of a loop, with the median time between two of them.

    Example:
      >>> import tempfile
      >>> from spanax.train.record.heartbeat import read
      >>> loop = LoopPulse(Pulse(Path(tempfile.mkdtemp()), rank=0, attempt=0))
      >>> loop.beat(1, "step")
      >>> read(loop.pulse.folder)[0].phase
      'compile'
    """

    pulse: Pulse
    step: int = 0
    _last_beat: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def beat(self, step: int, phase: str) -> None:
        """Writes a heartbeat after `step` steps, in a phase of PHASES."""
        now = time.monotonic()
        if phase == "step":
            if self._last_beat is not None:
                self._seconds.append(now - self._last_beat)
            self._last_beat = now
            if not self._seconds:
                phase = "compile"  # the next step may compile as well: the first one returned arrays of other shardings
        self.step = step
        self.pulse.beat(phase, step, step_seconds=statistics.median(self._seconds) if self._seconds else 0.0)


def heartbeat(step: int, *, phase: str = "step") -> None:
    """Reports progress to the supervisor of `spanax launch`, which then restarts the processes if one of them hangs.

    Call it after every step, on every process. A process that has called it once hangs if the next call takes longer
    than `--stuck-seconds` (60), or ten times the median time between calls if that is longer. A phase other than `step`
    lasts until the next call, and up to `--quiet-seconds` (1800); so does the time until the second call, for
    compilation. Without a supervisor this does nothing. It writes a small file at most ten times per second.

    Args:
      step: the number of steps taken.
      phase: the next phase, if it is not another step: `save`, `evaluate` or `restore`; `end` ends the detection.

    Raises:
      SpanaxError: `step` is not an integer >= 0, or the phase is unknown.

    Example:
      >>> for step in range(1, 3):
      ...     heartbeat(step)
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise RangeError(f"step is {step!r}; expected an integer >= 0.", where="spanax.heartbeat")
    if phase not in PHASES:
        raise UnknownNameError(f"unknown phase '{phase}'.", where="spanax.heartbeat", fix=nearest(phase, PHASES))
    loop = _loop()
    if loop is not None:
        loop.beat(number, phase)


@functools.cache
def _loop() -> LoopPulse | None:
    """Returns what writes the heartbeats of this process; None without a supervisor."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or not attach_supervisor():
        return None
    hosts = Hosts.of()
    loop = LoopPulse(Pulse(Path(folder), hosts.rank, hosts.attempt))
    # A process that has ended is silent, too, while others still work.
    atexit.register(lambda: loop.beat(loop.step, "end"))
    return loop
