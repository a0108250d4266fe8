"""The wall time of a run over all attempts, from the ledgers in its folder.

The last ledger of a killed attempt is in its events or its heartbeat, whichever is newer. Time after that counts as
`restart`, and steps after that count when they are repeated. Does not import JAX.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from spanax.entries.names import EVENTS
from spanax.errors import MissingFileError
from spanax.train.record import heartbeat
from spanax.train.record.events import Begin, End, Event, EventLog, Events, Spent, Stuck, read
from spanax.train.record.time_ledger import BUCKETS

OUTCOMES = {"stuck": "stuck", "died": "died", "preempted": "preempted", "end": "finished", "stopped": "stopped"}
"""How an attempt ended, by event; the first of these events that occurred decides."""

SILENT_SECONDS = 120.0
"""A process on another host counts as ended after this time without a heartbeat."""


@dataclass(frozen=True)
class Attempt:
    """The part of a run between two restarts.

    Attributes:
      began: its start, in Unix seconds.
      ended: its last event or heartbeat, in Unix seconds.
      outcome: `finished`, `preempted`, `died`, `stuck`, `stopped`, `running`, or `killed` without such an event.
      first_step: the number of steps taken when it began.
      last_step: the number of steps taken when it ended.
      seconds: its wall time by bucket.
      place: the devices, hosts, mesh and layout of its `begin` event.
    """

    began: float
    ended: float
    outcome: str
    first_step: int
    last_step: int
    seconds: Mapping[str, float]
    place: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TimeAccount:
    """The wall time of a run from its first event to its last event or heartbeat.

    Attributes:
      attempts: the attempts in the order they began.
      seconds: the wall time by bucket; `restart` includes the time between attempts.
      paused_seconds: the time between a run that finished, or was stopped on request, and its continuation by hand; not
        part of the wall time.
      faults: the events about faults and the reactions to them, in order.
      num_damaged: the number of lines of events.jsonl that cannot be parsed.
      unknown: the number of events of each kind that this version does not know; they are ignored.
      is_tail: whether the account begins with the last events, because there are too many.
    """

    attempts: Sequence[Attempt]
    seconds: Mapping[str, float]
    paused_seconds: float
    faults: Sequence[Mapping[str, Any]]
    num_damaged: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)
    is_tail: bool = False

    @property
    def wall_seconds(self) -> float:
        """The sum of all buckets."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The fraction of the wall time spent in steps, without repeated ones; 0 for an empty run."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def reached(self) -> int:
        """The last step finished by any attempt."""
        return max(attempt.last_step for attempt in self.attempts)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        summed = {"goodput": self.goodput, "wall_seconds": self.wall_seconds, "reached": self.reached}
        return summed | asdict(self)


def account(folder: Path) -> TimeAccount:
    """Returns the wall time of the run in a folder, whether it is running, ended or was killed.

    The time between two attempts is measured on the system clock; adjusting the clock changes `restart`.

    Raises:
      DataError: the folder has no events of a run.

    Example:
      >>> import tempfile
      >>> events = Events(Path(tempfile.mkdtemp()))
      >>> for began in (0, 60):
      ...     events.append("begin", time=began, step=0)
      ...     seconds = {"start": 8, "step": 32}
      ...     events.append("ledger", time=began + 40, step=9, seconds=seconds, wall_seconds=40)
      >>> times = account(events.folder)
      >>> times.goodput, times.seconds["restart"]
      (0.64, 28)
    """
    log = read(folder)
    parts = _parts(log)
    if not parts:
        raise MissingFileError(
            f"'{folder}' is not a run folder.",
            where=f"{EVENTS} has no `begin` event",
            fix="a run folder: the --output-dir of spanax train",
        )
    beat = heartbeat.read(folder).get(0)
    last = _spent(beat)
    earlier = [part for part in parts if last is not None and part[0].time <= last.time]
    if last is not None and earlier:
        earlier[-1].append(last)
    attempts = [_attempt(part) for part in parts]
    pauses = [
        _is_pause(attempt, before[0], after[0])
        for attempt, (before, after) in zip(attempts[:-1], pairwise(parts), strict=True)
    ]
    for number, is_pause in enumerate(pauses, 1):
        if not is_pause:
            attempts[number] = replace(attempts[number], seconds=_as_restart(attempts[number].seconds))
    if attempts[-1].outcome == "killed" and beat is not None and _is_alive(beat):
        attempts[-1] = replace(attempts[-1], outcome="running")
    seconds = {bucket: sum(attempt.seconds.get(bucket, 0) for attempt in attempts) for bucket in BUCKETS}
    paused = 0.0
    for is_pause, (before, after) in zip(pauses, pairwise(attempts), strict=True):
        gap = max(0, after.began - before.ended)
        if is_pause:
            paused += gap
        else:
            seconds["restart"] += gap
    faults = [event.record for event in log.events if not isinstance(event, Begin | Spent | End)]
    return TimeAccount(attempts, seconds, paused, faults, log.num_damaged, log.unknown, log.is_tail)


def _is_pause(attempt: Attempt, began: Event, after: Event) -> bool:
    """Returns whether a run needed no recovery between two attempts: it finished, or was stopped and resumed by hand.

    A launcher that resumes a preempted run counts attempts; by hand, a run begins with attempt 0 again.
    """
    return attempt.outcome == "finished" or (attempt.outcome == "preempted" and after.attempt <= began.attempt)


def reached(folder: Path) -> int:
    """Returns the last finished step of the run in a folder, saved or not; 0 for a new run."""
    last = _spent(heartbeat.read(folder).get(0))
    spent = [event for event in (*read(folder).events, last) if isinstance(event, Spent)]
    return max((event.step for event in spent), default=0)


def record_last_heartbeat(events: Events) -> None:
    """Appends the ledger of the first process's last heartbeat to the events, unless they have a newer one.

    Must be called before the heartbeats of a killed attempt are removed or overwritten.
    """
    last = _spent(heartbeat.read(events.folder).get(0))
    known = [event.time for event in read(events.folder).events if isinstance(event, Spent)]
    if last is not None and last.time > max(known, default=0.0):
        values = {name: value for name, value in asdict(last).items() if name not in ("by", "record")}
        events.append(**values)


def _parts(log: EventLog) -> list[list[Event]]:
    """Groups events by attempt: each `begin` event starts one, and so does a ledger of an attempt without one.

    Attempt numbers do not separate attempts, because a run resumed by hand has attempt 0 again.
    """
    parts: list[list[Event]] = []
    for event in log.events:
        begins = (isinstance(event, Begin) and event.by != "supervisor") or (log.is_tail and not parts)
        is_orphan = isinstance(event, Spent) and not (parts and parts[-1][0].attempt == event.attempt)
        if begins or is_orphan:
            parts.append([event])
        elif parts:
            parts[-1].append(event)
    return parts


def _attempt(events: Sequence[Event]) -> Attempt:
    """Summarizes the events of one attempt."""
    begin = events[0]
    numbered = [event for event in events if event.attempt == begin.attempt]
    records = [event for event in numbered if isinstance(event, Spent)]
    newest = max(records, key=lambda record: record.wall_seconds, default=None)
    if newest is None:
        # Killed before its first ledger.
        last = max(event.time for event in numbered if event.by == begin.by)
        spent = last - begin.time
        newest = Spent(event="ledger", time=last, step=0, wall_seconds=spent, seconds={"start": spent})
    # A preempted run also writes an `end` event.
    names = {"preempted" if isinstance(event, End) and event.how == "preempted" else event.event for event in numbered}
    first = begin.step if isinstance(begin, Begin) else 0
    place = ("devices", "hosts", "mesh", "layout")
    return Attempt(
        began=newest.time - newest.wall_seconds,
        ended=newest.time,
        outcome=next((outcome for name, outcome in OUTCOMES.items() if name in names), "killed"),
        first_step=first,
        last_step=max([first, *(record.step for record in records)]),
        seconds=_without_silence(newest, numbered),
        place={key: value for key in place if (value := getattr(begin, key, None)) is not None},
    )


def _without_silence(record: Spent, events: Sequence[Event]) -> Mapping[str, float]:
    """Returns the seconds of a ledger, with the time in which the process hung moved to `restart`."""
    seconds = dict(record.seconds)
    for event in events:
        if isinstance(event, Stuck) and event.seconds is not None:
            lost = min(event.seconds, record.time - (event.time - event.seconds))
            phase = event.phase
            bucket = max(seconds, key=lambda name: (name == phase, seconds[name]))
            lost = max(0, min(lost, seconds[bucket]))
            seconds[bucket] -= lost
            seconds["restart"] = seconds.get("restart", 0) + lost
    return seconds


def _as_restart(seconds: Mapping[str, float]) -> dict[str, float]:
    """Moves `start` to `restart`, for an attempt after a fault that was started by hand."""
    spent = dict(seconds)
    spent["restart"] = spent.get("restart", 0) + spent.pop("start", 0)
    return spent


def _spent(beat: heartbeat.Heartbeat | None) -> Spent | None:
    """Converts a heartbeat, if any, to a `ledger` event; None if it has no ledger."""
    if beat is None or not beat.seconds:
        return None
    return Spent(
        event="ledger",
        time=beat.time,
        attempt=beat.attempt,
        step=beat.step,
        seconds=dict(beat.seconds),
        wall_seconds=sum(beat.seconds.values()),
    )


def _is_alive(beat: heartbeat.Heartbeat) -> bool:
    """Returns whether the process of a heartbeat is still running; on another host, whether it was recent."""
    if beat.host != socket.gethostname():
        return time.time() - beat.time < SILENT_SECONDS
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
