"""Copies the log of a process to standard error as it grows."""

import codecs
import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.names import RANK_LOG
from spanax.launch.exit_codes import ATTEMPT
from spanax.printable import printable_lines

STDERR = 2
CHUNK_BYTES = 1 << 16
"""The size of the parts that are copied."""

POLL_SECONDS = 0.1
LAST_SECONDS = 5.0
"""The time between two copies, and how long the end of the log may take: the terminal may have been stopped."""


@dataclass
class LogCopy:
    """Shows what a process writes to its log, so that the log is complete and the user sees it at once.

    A pipe in place of the log would end with the supervisor, and its process at the next line that it prints. A thread
    copies, so that neither an endless log nor a slow terminal delays the supervisor.

    Attributes:
      folder: the folder of the run or program.
      rank: the process.
    """

    folder: Path
    rank: int
    _offset: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts copying, without what the log already contains."""
        status = Folder.of(self.folder).stat(RANK_LOG.of(self.rank))
        self._offset = 0 if status is None else status.st_size
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._is_over,), daemon=True, name="spanax-log")
        self._thread.start()

    def finish(self) -> None:
        """Copies the end of the log."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)

    def _run(self, is_over: threading.Event) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        is_last = False
        while not is_last:
            is_last = is_over.wait(POLL_SECONDS)
            with suppress(OSError):  # the log may not exist yet, and nobody may be reading
                self._show(decoder)

    def _show(self, decoder: codecs.IncrementalDecoder) -> None:
        """Writes the new part of the log to standard error."""
        with Folder.of(self.folder).reading(RANK_LOG.of(self.rank)) as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(self._offset)
            while self._offset < end and (chunk := file.read(min(CHUNK_BYTES, end - self._offset))):
                self._offset += len(chunk)
                _write(_shown(decoder.decode(chunk)))


def _shown(text: str) -> str:
    """Returns a part of a log without the line that starts an attempt, and with control characters escaped.

    A carriage return, as of a progress bar, becomes a line break: it could overwrite what was shown before.
    """
    lines = re.sub(r"\r\n?", "\n", text).splitlines(keepends=True)
    return printable_lines("".join(line.expandtabs() for line in lines if not line.startswith(ATTEMPT)))


def _write(text: str) -> None:
    # Not through `sys.stderr`: a thread that waits for the terminal would hold its lock when Python exits.
    rest = text.encode(errors="backslashreplace")
    while rest:
        rest = rest[os.write(STDERR, rest) :]
