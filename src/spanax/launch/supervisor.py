"""Supervisor: starts the processes of a run, notices which of them died or hang, and starts all of them again.

What JAX does when a process dies is an abort that no Python can catch, and when one hangs, nothing: so this is a
process of its own, without JAX, that sees only exit codes, heartbeats and the run folder.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from spanax.errors import PREEMPTED, SpanaxError
from spanax.launch.exit_codes import Ending, ending_of, last_words
from spanax.printable import to_stderr
from spanax.run.record import heartbeat, time_account
from spanax.run.record.events import Events
from spanax.run.record.run_lock import supervised

POLL_SECONDS = 0.2

STACKS_SECONDS = 2.0
"""How long the processes have to write their stacks down before they are killed."""

LONGEST_BACKOFF_SECONDS = 60.0

SAME_STEP, SAME_STEP_KILLED = 3, 10
"""So many ends at one step in a row are no accident; a kill may come from anyone, or from a lack of memory."""

STEP_FACTOR = 10
"""A step may take so many times the median step before it counts as stuck, or `stuck_seconds` if that is longer."""


@dataclass(frozen=True)
class Limits:
    """How long a silence may be, and how often to start again.

    Attributes:
      stuck_seconds: the shortest silence within steps that counts as stuck.
      quiet_seconds: the longest silence while starting, compiling, saving, restoring and evaluating.
      stop_seconds: how long the processes have to save and end when asked to stop.
      restarts: how often to start again at most.
      backoff_seconds: the wait before the first restart; it doubles while no step is gained.
    """

    stuck_seconds: float = 60.0
    quiet_seconds: float = 1800.0
    stop_seconds: float = 120.0
    restarts: int = 100
    backoff_seconds: float = 1.0


@dataclass(frozen=True)
class Silence:
    """A process that was not heard of for too long, and where it was last."""

    rank: int
    pid: int
    host: str
    phase: str
    step: int
    seconds: float


class Process(Protocol):
    """A process of a run: a child of this one, or what stands for one on another machine."""

    def poll(self) -> int | None:
        """Its exit code, a signal as a negative number; None while it runs."""

    def wait(self) -> int:
        """Its exit code, once it has ended."""

    def send_signal(self, number: int) -> None:
        """Send it a signal."""

    def kill(self) -> None:
        """End it at once."""


Start = Callable[[int], Sequence[Process]]
"""Starts all processes of an attempt, in the order of their ranks."""


@dataclass
class Supervisor:
    """One run under watch.

    Attributes:
      start: starts the processes of an attempt.
      folder: the run folder.
      limits: when to give up on them.
      say: takes a line for people.
      begun: how often the run was begun before by who started this process; its attempts count from there.
      rank: the first of the processes that it starts, where each host of a run has a supervisor.
    """

    start: Start
    folder: Path
    limits: Limits
    say: Callable[[str], None] = to_stderr
    begun: int = 0
    rank: int = 0
    _asked: list[int] = field(default_factory=list)

    def watch(self) -> int:
        """Start, watch and start again until the run has ended; returns its exit code.

        Raises:
          EntryError: something other than a regular file or folder is in the run folder.
          WriteError: the run folder is in use, or cannot be written; nothing in it was touched.
        """
        with supervised(self.folder, self.rank):
            return self._watch()

    def _watch(self) -> int:
        attempt = fallen = 0
        last_step, backoff_seconds = -1, self.limits.backoff_seconds
        with self._signals():
            while True:
                events = Events(self.folder, by="supervisor", attempt=self.begun + attempt)
                ended = self._attempt(attempt, events)
                if ended.code in (0, PREEMPTED) or self._asked:
                    if ended.code not in (0, PREEMPTED):
                        self.say(f"asked to stop: {ended.what} What was saved before is there.")
                    events.tell("end", how=ended.what, code=ended.code)
                    return ended.code
                fallen = fallen + 1 if ended.step == last_step else 1
                gained, last_step = ended.step > last_step, ended.step
                backoff_seconds = self.limits.backoff_seconds if gained else backoff_seconds * 2
                why = ended.is_final and "it would end the same way again"
                allowed = SAME_STEP_KILLED if ended.is_killed else SAME_STEP
                why = why or (fallen >= allowed and f"it ended {fallen} times at step {ended.step}")
                why = why or (attempt >= self.limits.restarts and f"it was started again {attempt} times")
                if why:
                    events.tell("stopped", why=why, what=ended.what, step=ended.step, code=ended.code)
                    self.say(f"{ended.what} Not starting again: {why}.")
                    self._tell_words(ended)
                    return ended.code
                attempt += 1
                wait_seconds = min(backoff_seconds, LONGEST_BACKOFF_SECONDS)
                events.tell("restart", what=ended.what, step=ended.step, wait_seconds=wait_seconds)
                self.say(f"{ended.what} Starting again in {wait_seconds:g} s ({attempt} of {self.limits.restarts}).")
                self._sleep(wait_seconds)
                if self._asked:
                    return PREEMPTED

    def _attempt(self, attempt: int, events: Events) -> Ending:
        """Start the processes once, and see them all to their end."""
        time_account.keep_beat(events)
        heartbeat.forget(self.folder)
        processes = list(self.start(self.begun + attempt))
        try:
            ended = self._watched(processes, events)
        finally:
            self._kill(processes)
        return ended.at(max((beat.step for beat in heartbeat.read(self.folder).values()), default=0))

    def _watched(self, processes: Sequence[Process], events: Events) -> Ending:
        seen: dict[int, tuple[int | None, float]] = {}
        born = time.monotonic()
        stop_at: float | None = None
        while True:
            codes = [process.poll() for process in processes]
            if all(code is not None for code in codes):
                return self._died(codes, events) if any(codes) else Ending(0, "done")
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, PREEMPTED)]
            if failed and stop_at is None:
                ended = self._died(codes, events)
                self._write_stacks(processes)
                return ended
            if self._asked and stop_at is None:
                stop_at = time.monotonic() + self.limits.stop_seconds
                for process in processes:
                    process.send_signal(signal.SIGTERM)
            if stop_at is not None and time.monotonic() > stop_at:
                return Ending(70, f"the processes did not stop within {self.limits.stop_seconds:g} s.")
            if silent := self._silent(seen, born):
                stopped = [one.rank for one in silent if _is_stopped(one)]
                self._write_stacks(processes)
                first = min(silent, key=lambda one: (one.rank not in stopped, one.step, one.rank))
                ranks = [one.rank for one in silent]
                events.tell("stuck", ranks=ranks, stopped=stopped, **asdict(first))
                return Ending(70, _stuck_text(first, ranks, stopped), first.rank)
            self._sleep(POLL_SECONDS)

    def _died(self, codes: Sequence[int | None], events: Events) -> Ending:
        ended = ending_of(codes)
        if ended.code != PREEMPTED:
            words = last_words(self.folder, ended.rank)
            events.tell("died", rank=ended.rank, what=ended.what, code=ended.code, words=words)
        return ended

    def _silent(self, seen: dict[int, tuple[int | None, float]], born: float) -> list[Silence]:
        """The silent ranks, once one of them was silent for too long; by this process's clock alone."""
        now, is_late = time.monotonic(), False
        silent = []
        for rank, beat in heartbeat.read(self.folder).items():
            stamp = heartbeat.stamp(self.folder, rank)
            if seen.get(rank, (None, 0.0))[0] != stamp:
                seen[rank] = (stamp, now)
            seconds = now - seen[rank][1]
            allowed = max(self.limits.stuck_seconds, STEP_FACTOR * beat.step_seconds)
            allowed = allowed if beat.phase == "step" else self.limits.quiet_seconds
            is_late = is_late or (beat.phase != "end" and seconds > allowed)
            # Those that wait for it may have beaten before or after it.
            if beat.phase != "end" and seconds > allowed / 2:
                silent.append(Silence(rank, beat.pid, beat.host, beat.phase, beat.step, round(seconds, 1)))
        if not seen and now - born > self.limits.quiet_seconds:
            return [Silence(0, 0, "", "start", 0, round(now - born, 1))]
        return silent if is_late else []

    def _write_stacks(self, processes: Sequence[Process]) -> None:
        """Have every process that lives write down where it is, into its own log; a stopped one is woken for it."""
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGCONT)
        if alive:
            time.sleep(STACKS_SECONDS)

    def _kill(self, processes: Sequence[Process]) -> None:
        for process in processes:
            if process.poll() is None:
                if not isinstance(process, subprocess.Popen):
                    process.kill()
                    continue
                # Its own process group: what it started itself goes with it.
                with _gone_is_fine():
                    os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()

    def _tell_words(self, ended: Ending) -> None:
        for line in last_words(self.folder, ended.rank).splitlines():
            self.say(f"rank {ended.rank}: {line}")

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """What asks this process to stop is passed on; the second time ends everything at once."""

        def ask(number: int, frame: object) -> None:
            if self._asked:
                raise KeyboardInterrupt
            self._asked.append(number)

        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = {number: signal.signal(number, ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _stuck_text(first: Silence, ranks: Sequence[int], stopped: Sequence[int]) -> str:
    who = f"rank {first.rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    why = f"; rank {first.rank} was stopped by a signal" if first.rank in stopped else ""
    return f"{who} gave no sign of life for {first.seconds:g} s in {first.phase}, behind step {first.step}{why}."


def _is_stopped(one: Silence) -> bool:
    """Whether a process was stopped by a signal; not known of another machine's, and where there is no /proc."""
    try:
        state = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return one.host == socket.gethostname() and state == "T"


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        pass


def as_flags(limits: Limits) -> list[str]:
    """The flags that say what differs from the defaults.

    Example:
      >>> as_flags(Limits(restarts=5, stop_seconds=30.0))
      ['--stop-seconds', '30.0', '--restarts', '5']
    """
    changed = [(name, value) for name, value in asdict(limits).items() if value != getattr(Limits, name)]
    return [word for name, value in changed for word in (f"--{name.replace('_', '-')}", str(value))]


def check(limits: Limits) -> Limits:
    """The limits, if they are possible.

    Raises:
      SpanaxError: they are not.
    """
    for name in ("stuck_seconds", "quiet_seconds", "stop_seconds"):
        value = getattr(limits, name)
        if not value > 0:
            raise SpanaxError(f"--{name.replace('_', '-')} is {value:g}; it takes seconds above 0.")
    if limits.restarts < 0 or not limits.backoff_seconds >= 0:
        raise SpanaxError(f"--restarts {limits.restarts} and --backoff-seconds {limits.backoff_seconds:g} start at 0.")
    return limits
