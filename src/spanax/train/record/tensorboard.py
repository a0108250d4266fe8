"""A tracker that writes TensorBoard event files to the run folder."""

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
from spanax.train.record.trackers import RunInfo


@dataclass(eq=False)
class TensorBoard:
    """Writes event files to `tensorboard/` in the run folder; `tensorboard --logdir runs` shows them.

    Each event is written synchronously: tensorboardX's own writer thread dies on a full disk, and the run would then
    block on it.
    """

    _folder: Folder = Folder(Path())
    _name: Name = EVENT_FILE

    def begin(self, about: RunInfo) -> None:
        """Opens a new file for each attempt; its steps override those of earlier files."""
        from tensorboardX.summary import text

        self._folder = Folder.of(about.folder)
        self._folder.make(TENSORBOARD)
        # TensorBoard reads files in the order of their names.
        self._name = EVENT_FILE.of(f"{time.time_ns()}.{socket.gethostname()}.{os.getpid()}")
        self._write(file_version="brain.Event:2")
        if about.step:
            self.back(about.step)
        for tag, values in (("settings", about.settings), ("plan", about.summary)):
            lines = [f"    {key}: {json.dumps(value)}" for key, value in values.items() if value is not None]
            self._write(step=about.step, summary=text(tag, "\n".join(lines)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one scalar per value."""
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=scalars))

    def back(self, step: int) -> None:
        """Writes a session start after `step`, at which TensorBoard discards later values."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def end(self) -> None:
        """Does nothing: every event has been written."""

    def _write(self, **values: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event as Record
        from tensorboardX.record_writer import masked_crc32c

        record = Record(wall_time=time.time(), **values).SerializeToString()
        size = struct.pack("<Q", len(record))
        framed = size + struct.pack("<I", masked_crc32c(size)) + record + struct.pack("<I", masked_crc32c(record))
        with self._folder.appending(self._name) as descriptor:
            if os.write(descriptor, framed) < len(framed):
                raise OSError(f"'{self._folder.path / self._name}' accepted only a part of an event")
