"""A log file that survives a full disk and the removal of its folder."""

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from spanax.entries.folder import Folder
from spanax.entries.names import Name
from spanax.printable import to_stderr

MAX_PENDING = 10_000
"""The number of lines buffered in memory while the disk is full; beyond it, the oldest are dropped."""


@dataclass(eq=False)
class AppendLog:
    """Appends lines to a text file; lines that cannot be written are buffered and written with the next line.

    Example:
      >>> import tempfile
      >>> from spanax.entries.names import METRICS
      >>> log = AppendLog(Folder.of(tempfile.mkdtemp()), METRICS)
      >>> log.write("{}")
      >>> list(log.folder.lines(METRICS))
      [{}]
    """

    folder: Folder
    name: Name
    _pending: deque[bytes] = field(default_factory=partial(deque, maxlen=MAX_PENDING))
    _is_reported: bool = False

    def write(self, line: str) -> None:
        """Appends a line; the first of several failures is reported on standard error, and none raises."""
        self._pending.append(line.encode() + b"\n")
        try:
            self._flush()
        except OSError as error:
            if not self._is_reported:
                path = self.folder.path / self.name
                message = f"cannot write '{path}': {error.strerror}; training continues, and its lines are buffered."
                self._is_reported = True
                with suppress(OSError):  # standard error may be a file on the same disk
                    to_stderr(message)
        else:
            self._is_reported = False

    def _flush(self) -> None:
        # Opened for each write: lines written to a removed file would be lost.
        with self.folder.appending(self.name) as descriptor:
            while self._pending:
                num_written = os.write(descriptor, self._pending[0])
                remainder = self._pending[0][num_written:]
                if remainder:  # a disk that fills up writes a part of a line
                    self._pending[0] = remainder
                else:
                    self._pending.popleft()
