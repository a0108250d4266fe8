"""Lines: a file that a run appends to, over a disk that is full for a while and a folder that vanishes."""

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from spanax.entries.folder import Folder
from spanax.entries.names import Name
from spanax.printable import to_stderr

MOST_WAITING = 10_000
"""So many lines are kept in memory for a disk that takes them again; then the oldest are lost."""


@dataclass(eq=False)
class AppendLog:
    """A text file that grows line by line; what cannot be written waits, and is written before the next line.

    Example:
      >>> import tempfile
      >>> from spanax.entries.names import METRICS
      >>> lines = Lines(Folder.of(tempfile.mkdtemp()), METRICS)
      >>> lines.write("{}")
      >>> lines.folder.read(METRICS)
      b'{}\\n'
    """

    folder: Folder
    name: Name
    _waiting: deque[bytes] = field(default_factory=partial(deque, maxlen=MOST_WAITING))
    _is_told: bool = False

    def write(self, line: str) -> None:
        """Append a line. That it cannot be written is told once on standard error, and ends nothing."""
        self._waiting.append(line.encode() + b"\n")
        try:
            self._flush()
        except OSError as error:
            if not self._is_told:
                path = self.folder.path / self.name
                told = f"cannot write '{path}': {error.strerror}; the run goes on, and its lines wait for room."
                self._is_told = True
                with suppress(OSError):  # it may be a file on the same disk
                    to_stderr(told)
        else:
            self._is_told = False

    def _flush(self) -> None:
        # Opened every time: a file that was removed, or whose folder was, would take lines that nobody can read.
        with self.folder.appending(self.name) as descriptor:
            while self._waiting:
                written = os.write(descriptor, self._waiting[0])
                rest = self._waiting[0][written:]
                if rest:  # a disk that fills up takes a part; what is left belongs right behind it
                    self._waiting[0] = rest
                else:
                    self._waiting.popleft()
