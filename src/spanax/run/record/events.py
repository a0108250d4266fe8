"""Events: what happened to a run, one JSON object a line in events.jsonl, by its leader and by its supervisor.

Nothing here imports JAX: a supervisor and `spanax report` read and write the same file as a run.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spanax.documents import json_line
from spanax.entries.folder import Folder
from spanax.entries.names import EVENTS
from spanax.printable import to_stderr
from spanax.schema import Count, SchemaError, Seconds, parsed


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have in common.

    Attributes:
      event: its kind, one of KINDS.
      time: Unix seconds.
      by: `rank 0` or `supervisor`.
      attempt: how often the run was started again before.
      record: all that its line says.
    """

    event: str
    time: Seconds
    by: str = ""
    attempt: Count = 0
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class Begin(Event):
    """An attempt is ready for its first step, behind `step`."""

    step: Count = 0
    pid: Count | None = None
    hosts: Count | None = None
    devices: Count | None = None
    mesh: Mapping[str, Count] | None = None
    layout: str | None = None


@dataclass(frozen=True, kw_only=True)
class Spent(Event):
    """What the wall time of an attempt went to so far, by bucket (`run.record.ledger`)."""

    step: Count
    seconds: Mapping[str, Seconds]
    wall_seconds: Seconds

    def __post_init__(self) -> None:
        if not self.seconds:
            raise SchemaError("seconds", {}, Mapping, "seconds has no bucket")


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """A process of the run ended as it should."""

    how: str = ""


@dataclass(frozen=True, kw_only=True)
class Stuck(Event):
    """A process gave no sign of life for `seconds`, in `phase`."""

    seconds: Seconds | None = None
    phase: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault(Event):
    """Something went wrong, or something was done about it; what exactly is for people to read."""

    step: Count | None = None


KINDS: Mapping[str, type[Event]] = {
    "begin": Begin, "ledger": Spent, "end": End, "stuck": Stuck,
    **dict.fromkeys(
        ("died", "stopped", "restart", "preempted", "replanned", "bad_step", "skipped", "rolled_back", "save_failed"),
        Fault,
    ),
}  # fmt: skip
"""The kinds of events, and the schema of each."""


@dataclass(frozen=True)
class EventLog:
    """The events of a run.

    Attributes:
      events: in the order in which they were written.
      num_damaged: lines that are no events, but for one that is being written.
      unknown: how many events there are of each kind that this version does not know.
    """

    events: tuple[Event, ...] = ()
    num_damaged: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The events as plain values."""
        return [dict(event.record) for event in self.events]


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
      >>> [(line["event"], line["attempt"], line["rank"]) for line in read(events.folder).records]
      [('died', 2, 1)]
    """

    folder: Path
    by: str = "rank 0"
    attempt: int = 0

    def tell(self, event: str, **values: Any) -> None:
        """Append one event; a disk that is full or gone is told of on standard error, and ends nothing.

        Raises:
          EntryError: the file is something else.
          KeyError: it is of a kind that nobody could read.
        """
        if event not in KINDS:
            raise KeyError(event)
        record = {"event": event, "time": round(time.time(), 3), "by": self.by, "attempt": self.attempt, **values}
        line = (json_line(record) + "\n").encode()
        try:
            # One write at the end of the file: lines of two processes never mix.
            with Folder.of(self.folder).appending(EVENTS) as descriptor:
                size_bytes = os.fstat(descriptor).st_size
                is_half = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
                os.write(descriptor, b"\n" * is_half + line)
        except OSError as error:
            to_stderr(f"cannot write to '{self.folder / EVENTS}': {error.strerror}: {line.decode().rstrip()}")


def read(folder: Path) -> EventLog:
    """The events of a run in the order in which they were written; none where there is no file."""
    events: list[Event] = []
    num_damaged, unknown = 0, Counter[str]()
    for record in Folder.of(folder).lines(EVENTS):
        kind = None if record is None else record.get("event")
        if isinstance(kind, str) and kind not in KINDS:
            unknown[kind] += 1
        elif (event := _event(record)) is None:
            num_damaged += 1
        else:
            events.append(event)
    return EventLog(tuple(events), num_damaged, dict(unknown))


def _event(record: Mapping[str, Any] | None) -> Event | None:
    """A record as the event that it tells of; None where it is damaged."""
    kind = None if record is None else record.get("event")
    if record is None or not isinstance(kind, str):
        return None
    try:
        return parsed(KINDS[kind], {**record, "record": record}, is_open=True, is_strict=False)
    except SchemaError:
        return None
