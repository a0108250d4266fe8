"""Events: what happened to a run, one JSON object a line in events.jsonl, by its leader and by its supervisor.

Nothing here imports JAX: a supervisor and `spanax report` read and write the same file as a run.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanax.documents import json_line
from spanax.entries.folder import Folder
from spanax.entries.names import EVENTS


@dataclass(frozen=True)
class Events:
    """Who tells of a run, and where.

    Attributes:
      folder: the run folder.
      by: `rank 0` or `supervisor`.
      attempt: how often the run was started again before this time.

    Example:
      >>> import tempfile
      >>> events = Events(Path(tempfile.mkdtemp()), by="supervisor", attempt=2)
      >>> events.tell("died", rank=1, signal="SIGKILL")
      >>> [(line["event"], line["attempt"], line["rank"]) for line in read(events.folder)]
      [('died', 2, 1)]
    """

    folder: Path
    by: str = "rank 0"
    attempt: int = 0

    def tell(self, event: str, **values: Any) -> None:
        """Append one event; a disk that is full or gone is told of on standard error, and ends nothing.

        Raises:
          EntryError: the file is something else.
        """
        record = {"event": event, "time": round(time.time(), 3), "by": self.by, "attempt": self.attempt, **values}
        line = (json_line(record) + "\n").encode()
        try:
            # One write at the end of the file: lines of two processes never mix.
            with Folder.of(self.folder).appending(EVENTS) as descriptor:
                size_bytes = os.fstat(descriptor).st_size
                is_half = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
                os.write(descriptor, b"\n" * is_half + line)
        except OSError as error:
            print(
                f"spanax: cannot write to '{self.folder / EVENTS}': {error.strerror}: {line.decode()}", file=sys.stderr
            )


def read(folder: Path) -> list[dict[str, Any]]:
    """The events of a run in the order they were told; half a line, from a kill or a full disk, is left out."""
    return [dict(event) for event in Folder.of(folder).lines(EVENTS) if "event" in event]
