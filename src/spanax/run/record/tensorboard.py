"""TensorBoard: a tracker that writes event files into the run folder."""

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import EVENT_FILE, TENSORBOARD, Name
from spanax.run.record.trackers import RunInfo


@dataclass(eq=False)
class TensorBoard:
    """Writes event files into `tensorboard/` of the run folder; `tensorboard --logdir runs` shows them.

    Each event is written at once and by the thread that tells of it: tensorboardX's own writer is a thread that a full
    disk ends, and the run would then wait for it.
    """

    _folder: Folder = Folder(Path())
    _name: Name = EVENT_FILE

    def begin(self, about: RunInfo) -> None:
        """A file of its own for each attempt; what comes behind its step hides what an earlier one wrote there."""
        from tensorboardX.summary import text

        self._folder = Folder.of(about.folder)
        self._folder.make(TENSORBOARD)
        # TensorBoard reads files in the order of their names.
        self._name = EVENT_FILE.of(f"{time.time_ns()}.{socket.gethostname()}.{os.getpid()}")
        self._write(file_version="brain.Event:2")
        if about.step:
            self.back(about.step)
        for tag, told in (("settings", about.settings), ("plan", about.summary)):
            lines = [f"    {key}: {json.dumps(value)}" for key, value in told.items() if value is not None]
            self._write(step=about.step, summary=text(tag, "\n".join(lines)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A scalar each."""
        from tensorboardX.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=found))

    def back(self, step: int) -> None:
        """TensorBoard drops what came behind the step when it reads that the session began there."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def end(self) -> None:
        """Everything is written already."""

    def _write(self, **values: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event as Record
        from tensorboardX.record_writer import masked_crc32c

        record = Record(wall_time=time.time(), **values).SerializeToString()
        size = struct.pack("<Q", len(record))
        whole = size + struct.pack("<I", masked_crc32c(size)) + record + struct.pack("<I", masked_crc32c(record))
        with self._folder.appending(self._name) as descriptor:
            if os.write(descriptor, whole) < len(whole):
                raise OSError(f"'{self._folder.path / self._name}' took a part of an event only")
