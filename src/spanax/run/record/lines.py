"""Lines: a file that a run appends to, over a disk that is full for a while and a folder that vanishes."""

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from spanax.printable import to_stderr

MOST_WAITING = 10_000
"""So many lines are kept in memory for a disk that takes them again; then the oldest are lost."""


@dataclass(eq=False)
class Lines:
    """A text file that grows line by line; what cannot be written waits, and is written before the next line.

    Example:
      >>> import tempfile
      >>> lines = Lines(Path(tempfile.mkdtemp()) / "metrics.jsonl")
      >>> lines.write("{}")
      >>> lines.path.read_text()
      '{}\\n'
    """

    path: Path
    _waiting: deque[bytes] = field(default_factory=partial(deque, maxlen=MOST_WAITING))
    _is_told: bool = False

    def write(self, line: str) -> None:
        """Append a line. That it cannot be written is told once on standard error, and ends nothing."""
        self._waiting.append(line.encode() + b"\n")
        try:
            self._flush()
        except OSError as error:
            if not self._is_told:
                told = f"cannot write '{self.path}': {error.strerror}; the run goes on, and its lines wait for room."
                self._is_told = True
                with suppress(OSError):  # it may be a file on the same disk
                    to_stderr(told)
        else:
            self._is_told = False

    def _flush(self) -> None:
        # Opened every time: a file that was removed, or whose folder was, would take lines that nobody can read.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            while self._waiting:
                written = os.write(descriptor, self._waiting[0])
                rest = self._waiting[0][written:]
                if rest:  # a disk that fills up takes a part; what is left belongs right behind it
                    self._waiting[0] = rest
                else:
                    self._waiting.popleft()
        finally:
            os.close(descriptor)
