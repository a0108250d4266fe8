"""Reads and writes events.jsonl: one JSON object per line, from the first process of a run and from its supervisor.

Does not import JAX, because the supervisor and `spanax report` use it too.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spanax.documents import json_line
from spanax.entries.folder import Folder
from spanax.entries.names import EVENTS
from spanax.printable import to_stderr
from spanax.schema import Count, SchemaError, Seconds, parsed

MAX_EVENTS = 10_000
"""The number of events, the last ones, that are read."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """The fields of every event.

    Attributes:
      event: the kind, one of KINDS.
      time: Unix seconds.
      by: `rank 0` or `supervisor`.
      attempt: the number of restarts of the run before this event.
      record: all values of its line.
    """

    event: str
    time: Seconds
    by: str = ""
    attempt: Count = 0
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class Begin(Event):
    """An attempt is ready for the step after `step`."""

    step: Count = 0
    pid: Count | None = None
    hosts: Count | None = None
    devices: Count | None = None
    mesh: Mapping[str, Count] | None = None
    layout: str | None = None


@dataclass(frozen=True, kw_only=True)
class Spent(Event):
    """The wall time of an attempt so far, by bucket (`run.record.time_ledger`)."""

    step: Count
    seconds: Mapping[str, Seconds]
    wall_seconds: Seconds

    def __post_init__(self) -> None:
        if not self.seconds:
            raise SchemaError("seconds", {}, Mapping, "seconds has no bucket")


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """A process of the run ended normally."""

    how: str = ""


@dataclass(frozen=True, kw_only=True)
class Stuck(Event):
    """A process wrote no heartbeat for `seconds`, in `phase`."""

    seconds: Seconds | None = None
    phase: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault(Event):
    """A fault, or the reaction to one; its other values are for human readers."""

    step: Count | None = None


KINDS: Mapping[str, type[Event]] = {
    "begin": Begin, "ledger": Spent, "end": End, "stuck": Stuck,
    **dict.fromkeys(
        ("died", "stopped", "restart", "replanned", "bad_step", "skipped", "rolled_back", "save_failed"),
        Fault,
    ),
}  # fmt: skip
"""The schema of each kind of event."""


@dataclass(frozen=True)
class EventLog:
    """The events of a run.

    Attributes:
      events: in the order in which they were written.
      num_damaged: the number of lines that cannot be parsed, not counting one that is being written.
      unknown: the number of events of each kind that this version does not know.
      is_tail: whether earlier events were left out, because there are too many.
    """

    events: tuple[Event, ...] = ()
    num_damaged: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)
    is_tail: bool = False

    @property
    def records(self) -> list[dict[str, Any]]:
        """The events as JSON values."""
        return [dict(event.record) for event in self.events]


@dataclass(frozen=True)
class Events:
    """Appends events to events.jsonl.

    Attributes:
      folder: the run folder.
      by: the author of the events, `rank 0` or `supervisor`.
      attempt: the number of restarts of the run so far.

    Example:
      >>> import tempfile
      >>> events = Events(Path(tempfile.mkdtemp()), by="supervisor", attempt=2)
      >>> events.append("died", rank=1, signal="SIGKILL")
      >>> [(line["event"], line["attempt"], line["rank"]) for line in read(events.folder).records]
      [('died', 2, 1)]
    """

    folder: Path
    by: str = "rank 0"
    attempt: int = 0

    def append(self, event: str, **values: Any) -> None:
        """Appends one event; a failure to write is reported on standard error and does not raise.

        Raises:
          EntryError: events.jsonl is not a regular file.
          KeyError: the kind is not one of KINDS.
        """
        if event not in KINDS:
            raise KeyError(event)
        record = {"event": event, "time": round(time.time(), 3), "by": self.by, "attempt": self.attempt, **values}
        line = (json_line(record) + "\n").encode()
        try:
            # A single appending write: lines of two processes never interleave.
            with Folder.of(self.folder).appending(EVENTS) as descriptor:
                size_bytes = os.fstat(descriptor).st_size
                is_cut = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
                os.write(descriptor, b"\n" * is_cut + line)
        except OSError as error:
            to_stderr(f"cannot write to '{self.folder / EVENTS}': {error.strerror}: {line.decode().rstrip()}")


def read(folder: Path) -> EventLog:
    """Returns the last events of a run in the order in which they were written; none if there is no file."""
    events: deque[Event] = deque(maxlen=MAX_EVENTS)
    num_damaged = 0
    unknown = Counter[str]()
    place = Folder.of(folder)
    status = place.stat(EVENTS)
    is_tail = status is not None and status.st_size > EVENTS.max_bytes
    for record in place.lines(EVENTS, is_tail=True):
        kind = None if record is None else record.get("event")
        if isinstance(kind, str) and kind not in KINDS:
            unknown[kind] += 1
        elif (event := _event(record)) is None:
            num_damaged += 1
        else:
            is_tail = is_tail or len(events) == MAX_EVENTS
            events.append(event)
    return EventLog(tuple(events), num_damaged, dict(unknown), is_tail)


def _event(record: Mapping[str, Any] | None) -> Event | None:
    """Returns the event of a JSON record; None if it does not match its schema."""
    kind = None if record is None else record.get("event")
    if record is None or not isinstance(kind, str):
        return None
    try:
        return parsed(KINDS[kind], {**record, "record": record}, is_open=True, is_strict=False)
    except SchemaError:
        return None
