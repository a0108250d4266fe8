"""The account of a whole run: the ledgers of its attempts, and the time between them, read from its folder.

A run that was killed told of itself last in its events or in its heartbeat, whichever is newer. What it did after that
is lost to the account and counts as `restart`; the steps among it count once they are taken again. No JAX here.
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
from spanax.errors import DataError
from spanax.run.record import heartbeat
from spanax.run.record.events import Begin, End, Event, Events, Spent, Stuck, read
from spanax.run.record.time_ledger import BUCKETS

OUTCOMES = {"stuck": "stuck", "died": "died", "preempted": "preempted", "end": "finished", "stopped": "stopped"}
"""How an attempt ended, by the event that says so; the first of these that was told counts."""

SILENT_SECONDS = 120.0
"""A process on another host that was silent for so long counts as ended: nobody can look."""


@dataclass(frozen=True)
class Attempt:
    """One process group's part of a run.

    Attributes:
      began: Unix seconds.
      ended: of its last sign of life.
      outcome: `finished`, `preempted`, `died`, `stuck`, `stopped`, `running`, or `killed` where nobody told.
      first_step: steps that were taken when it began.
      last_step: and when it ended.
      seconds: what its wall time went to, by bucket.
      place: what its `begin` said of devices, hosts, mesh and layout.
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
    """A run from its first beginning to its last sign of life.

    Attributes:
      attempts: in the order they began.
      seconds: what the wall time of the run went to, by bucket; `restart` has the time between attempts in it.
      paused_seconds: between the end of a finished run and the attempt that went on with it; not part of the wall.
      faults: what the events say that tell of a fault or of what was done about it, in order.
      num_damaged: lines of the events that could not be read.
      unknown: events of each kind that this version does not know; they are not part of the account.
    """

    attempts: Sequence[Attempt]
    seconds: Mapping[str, float]
    paused_seconds: float
    faults: Sequence[Mapping[str, Any]]
    num_damaged: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)

    @property
    def wall_seconds(self) -> float:
        """All buckets together."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the wall in steps that were not taken before; 0 of nothing."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def reached(self) -> int:
        """The last step that any attempt finished."""
        return max(attempt.last_step for attempt in self.attempts)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        summed = {"goodput": self.goodput, "wall_seconds": self.wall_seconds, "reached": self.reached}
        return summed | asdict(self)


def account(folder: Path) -> TimeAccount:
    """The account of the run in a folder, whether it goes on, ended or was killed.

    Between the processes of two attempts lies no clock but that of the machine: a jump of it changes `restart`.

    Raises:
      DataError: it is not a run folder.

    Example:
      >>> import tempfile
      >>> events = Events(Path(tempfile.mkdtemp()))
      >>> for began in (0, 60):
      ...     events.tell("begin", time=began, step=0)
      ...     seconds = {"start": 8, "step": 32}
      ...     events.tell("ledger", time=began + 40, step=9, seconds=seconds, wall_seconds=40)
      >>> found = account(events.folder)
      >>> found.goodput, found.seconds["restart"]
      (0.64, 28)
    """
    log = read(folder)
    parts = _parts(log.events)
    if not parts:
        raise DataError(
            f"'{folder}' is not a run folder.", where=f"{EVENTS} has no beginning", fix="the folder of a run"
        )
    beat = heartbeat.read(folder).get(0)
    last = None if beat is None else _spent(beat)
    begun = [part for part in parts if last is not None and part[0].time <= last.time]
    if last is not None and begun:
        begun[-1].append(last)
    attempts = [_attempt(part) for part in parts]
    for number, (before, after) in enumerate(pairwise(attempts), 1):
        if before.outcome != "finished":
            attempts[number] = replace(after, seconds=_as_restart(after.seconds))
    if attempts[-1].outcome == "killed" and beat is not None and _is_alive(beat):
        attempts[-1] = replace(attempts[-1], outcome="running")
    seconds = {bucket: sum(one.seconds.get(bucket, 0) for one in attempts) for bucket in BUCKETS}
    paused = 0.0
    for before, after in pairwise(attempts):
        gap = max(0, after.began - before.ended)
        if before.outcome == "finished":
            paused += gap
        else:
            seconds["restart"] += gap
    faults = [event.record for event in log.events if not isinstance(event, Begin | Spent | End)]
    return TimeAccount(attempts, seconds, paused, faults, log.num_damaged, log.unknown)


def reached(folder: Path) -> int:
    """The last step that was finished in a run folder, saved or not; 0 in a new one."""
    beat = heartbeat.read(folder).get(0)
    last = None if beat is None else _spent(beat)
    spent = [event for event in (*read(folder).events, last) if isinstance(event, Spent)]
    return max((event.step for event in spent), default=0)


def keep_beat(events: Events) -> None:
    """Put what the leader's last heartbeat says of its wall time among the events, if nothing there is newer.

    To be called before the heartbeats of a killed attempt are forgotten or written anew.
    """
    beat = heartbeat.read(events.folder).get(0)
    last = None if beat is None else _spent(beat)
    known = [event.time for event in read(events.folder).events if isinstance(event, Spent)]
    if last is not None and last.time > max(known, default=0.0):
        values = {name: value for name, value in asdict(last).items() if name not in ("by", "record")}
        events.tell(**values)


def _parts(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each attempt, from its beginning, or from what is known of one that did not come so far.

    The number of an attempt is no sign of a new one: started by hand, every one is 0.
    """
    parts: list[list[Event]] = []
    for event in events:
        begins = isinstance(event, Begin) and event.by != "supervisor"
        is_orphan = isinstance(event, Spent) and not (parts and parts[-1][0].attempt == event.attempt)
        if begins or is_orphan:
            parts.append([event])
        elif parts:
            parts[-1].append(event)
    return parts


def _attempt(events: Sequence[Event]) -> Attempt:
    """What the events of one attempt say of it."""
    begin = events[0]
    own = [event for event in events if event.attempt == begin.attempt]
    records = [event for event in own if isinstance(event, Spent)]
    newest = max(records, key=lambda record: record.wall_seconds, default=None)
    if newest is None:
        # Killed before it could say anything of its time.
        last = max(event.time for event in own if event.by == begin.by)
        spent = last - begin.time
        newest = Spent(event="ledger", time=last, step=0, wall_seconds=spent, seconds={"start": spent})
    # A run that was asked to stop ends, too, and says so.
    names = {"preempted" if isinstance(event, End) and event.how == "preempted" else event.event for event in own}
    first = begin.step if isinstance(begin, Begin) else 0
    place = ("devices", "hosts", "mesh", "layout")
    return Attempt(
        began=newest.time - newest.wall_seconds,
        ended=newest.time,
        outcome=next((outcome for name, outcome in OUTCOMES.items() if name in names), "killed"),
        first_step=first,
        last_step=max([first, *(record.step for record in records)]),
        seconds=_without_silence(newest, own),
        place={key: value for key in place if (value := getattr(begin, key, None)) is not None},
    )


def _without_silence(record: Spent, events: Sequence[Event]) -> Mapping[str, float]:
    """The seconds of a record without those in which the process hung, if it was woken and went on before its end."""
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
    """The seconds of an attempt after a fault; started by hand, it does not know that it is not the first."""
    spent = dict(seconds)
    spent["restart"] = spent.get("restart", 0) + spent.pop("start", 0)
    return spent


def _spent(beat: heartbeat.Heartbeat) -> Spent | None:
    """A heartbeat as the `ledger` event it could have been; None where it says nothing of its time."""
    if not beat.seconds:
        return None
    return Spent(
        event="ledger", time=beat.time, attempt=beat.attempt, step=beat.step, seconds=dict(beat.seconds),
        wall_seconds=sum(beat.seconds.values()),
    )  # fmt: skip


def _is_alive(beat: heartbeat.Heartbeat) -> bool:
    """Whether the process of a beat still runs, as far as can be told from here."""
    if beat.host != socket.gethostname():
        return time.time() - beat.time < SILENT_SECONDS
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
