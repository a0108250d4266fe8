"""Copies the log of a process to standard error as it grows."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.names import RANK_LOG
from spanax.launch.exit_codes import ATTEMPT

CHUNK_BYTES = 1 << 16


@dataclass
class LogCopy:
    """Shows what a process writes to its log, so that the log is complete and the user sees it at once.

    A pipe in place of the log would end with the supervisor, and its process at the next line that it prints.

    Attributes:
      folder: the folder of the run or program.
      rank: the process.
    """

    folder: Path
    rank: int
    _offset: int = 0

    def skip(self) -> None:
        """Leaves out what the log already contains."""
        status = Folder.of(self.folder).stat(RANK_LOG.of(self.rank))
        self._offset = 0 if status is None else status.st_size

    def show(self) -> None:
        """Writes the new part of the log to standard error."""
        # The log may not exist yet, and nobody may be reading.
        with suppress(OSError), Folder.of(self.folder).reading(RANK_LOG.of(self.rank)) as file:
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                self._offset += len(chunk)
                sys.stderr.buffer.write(_without_header(chunk))
                sys.stderr.flush()


def _without_header(chunk: bytes) -> bytes:
    """Returns a chunk without the line that starts an attempt."""
    return b"".join(line for line in chunk.splitlines(keepends=True) if not line.startswith(ATTEMPT.encode()))
