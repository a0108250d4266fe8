"""Starts the processes of a run or a program, detects which of them died or hang, and restarts all of them.

If a process dies, JAX aborts the others, which Python cannot catch; if one hangs, nothing happens. The supervisor is
therefore a separate process without JAX, which reads only exit codes, heartbeats and the run folder.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from spanax.entries.names import LOGS
from spanax.errors import PREEMPTED
from spanax.launch.exit_codes import Ending, ending_of, last_words
from spanax.launch.guard import Guard, kill_all, started_by, state_of
from spanax.launch.log_copy import LogCopy
from spanax.launch.request import Request
from spanax.printable import to_stderr
from spanax.processes.gpu_memory import missing_setting, setting_text
from spanax.train.record import heartbeat, time_account
from spanax.train.record.events import Events
from spanax.train.record.run_lock import supervised

POLL_SECONDS = 0.2

STACKS_SECONDS = 2.0
"""How long the processes have to dump their stacks before they are killed."""

LONGEST_BACKOFF_SECONDS = 60.0

SAME_STEP = 3
SAME_STEP_KILLED = 10
"""Consecutive failures at one step after which the run stops: with several messages, and by SIGKILL, which may have
other causes, such as memory. It stops after two with the same message."""

CAUSE_SECONDS = 0.5
"""How long the other processes may take to end before the first cause is chosen."""

ENDED_SECONDS = 5.0
"""How long processes may run after another one has ended before a warning says so."""

RUN_RESTARTS = 100
PROGRAM_RESTARTS = 3
"""Default maximum numbers of restarts. A run always continues from a checkpoint; a program may start over."""

RESUME_AGAIN = "to resume: the same `spanax launch` command, with --resume at its end"
"""The line after a stopped run whose launcher has other flags than its processes."""

STEP_FACTOR = 10
"""A step may take this many median steps before it counts as stuck, or `stuck_seconds` if that is longer."""


@dataclass(frozen=True)
class Limits:
    """Timeouts for heartbeats, and limits on restarts.

    Attributes:
      stuck_seconds: minimum time without a heartbeat within a step that counts as stuck.
      quiet_seconds: maximum time without a heartbeat while starting, compiling, saving, restoring and evaluating.
      stop_seconds: time for the processes to save and exit after a stop signal.
      restarts: maximum number of restarts; by default 100 for `train`, and 3 for a program.
      backoff_seconds: delay before the first restart; it doubles until a new step completes.
    """

    stuck_seconds: float = 60.0
    quiet_seconds: float = 1800.0
    stop_seconds: float = 120.0
    restarts: int | None = None
    backoff_seconds: float = 1.0


@dataclass(frozen=True)
class Silence:
    """A process whose heartbeat is overdue, and its last phase and step."""

    rank: int
    pid: int
    host: str
    phase: str
    step: int
    seconds: float


class Process(Protocol):
    """A process of a run: a child process, or a handle on one of another machine."""

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""

    def wait(self) -> int:
        """Blocks until it ends, and returns the exit code."""

    def send_signal(self, number: int) -> None:
        """Sends it a signal."""

    def kill(self) -> None:
        """Kills it."""


Start = Callable[[int], Sequence[Process]]
"""Starts all processes of an attempt, in the order of their ranks."""


@dataclass
class Supervisor:
    """Supervises one run, or one program.

    Attributes:
      start: starts the processes of an attempt.
      folder: the run folder, or the folder of the program's logs and heartbeats.
      limits: timeouts and limits on restarts.
      say: prints a line for people.
      begun: the number of earlier starts by the launcher of this process; attempts are counted from it.
      rank: the first rank that it starts, if each host of a run has a supervisor.
      is_program: whether the processes run a program: its exit codes are passed on, and only those of its processes
        that have sent a heartbeat can be silent.
      log: shows the log of the first process; None if nothing does.
    """

    start: Start
    folder: Path
    limits: Limits
    say: Callable[[str], None] = to_stderr
    begun: int = 0
    rank: int = 0
    is_program: bool = False
    log: LogCopy | None = None
    _stop_signals: list[int] = field(default_factory=list)

    @staticmethod
    def of(
        start: Start, request: Request, limits: Limits, *, begun: int = 0, rank: int = 0, shows_first: bool = False
    ) -> "Supervisor":
        """Returns the supervisor of a request; `shows_first` shows the log of the first process of a program."""
        log = LogCopy(request.folder, rank) if shows_first and request.is_program else None
        return Supervisor(start, request.folder, limits, begun=begun, rank=rank, is_program=request.is_program, log=log)

    @property
    def max_restarts(self) -> int:
        """The maximum number of restarts."""
        default = PROGRAM_RESTARTS if self.is_program else RUN_RESTARTS
        return default if self.limits.restarts is None else self.limits.restarts

    def watch(self) -> int:
        """Starts the run, and restarts it until it has ended; returns its exit code.

        Raises:
          EntryError: the run folder contains an entry that is neither a regular file nor a folder.
          WriteError: the run folder is in use or not writable; it is unchanged.
        """
        with supervised(self.folder, self.rank):
            if self.is_program:
                self.say(f"the logs of all processes are in {self.folder / LOGS}")
            if missing := missing_setting():
                self.say(setting_text(missing, is_set=True))
            return self._watch()

    def _watch(self) -> int:
        attempt = num_same_step = 0
        last = Ending(0, "", step=-1)
        backoff_seconds = self.limits.backoff_seconds
        with self._signals(), closing(Guard(self.limits.stop_seconds)) as guard:
            while True:
                events = Events(self.folder, by="supervisor", attempt=self.begun + attempt)
                ending = self._attempt(attempt, events, guard)
                if ending.code in (0, PREEMPTED) or self._stop_signals:
                    if ending.code not in (0, PREEMPTED):
                        intact = "" if self.is_program else " Earlier checkpoints are intact."
                        self.say(f"stopped on request: {ending.what}{intact}")
                    events.append("end", how=ending.what, code=ending.code)
                    return ending.code
                is_same_step = ending.step == last.step
                is_same_error = is_same_step and ending.words != "" and ending.words == last.words
                num_same_step = num_same_step + 1 if is_same_step and ending.has_step else 1
                backoff_seconds = self.limits.backoff_seconds if ending.step > last.step else backoff_seconds * 2
                last = ending
                reason = ""
                if ending.is_final:
                    reason = "a restart would end the same way"
                elif is_same_error:
                    reason = "it ended 2 times with the same error"
                elif num_same_step >= (SAME_STEP_KILLED if ending.is_killed else SAME_STEP):
                    reason = f"it ended {num_same_step} times at step {ending.step}"
                elif attempt >= self.max_restarts:
                    reason = f"it was restarted {attempt} times"
                if reason:
                    events.append("stopped", why=reason, what=ending.what, step=ending.step, code=ending.code)
                    self.say(f"{ending.what} Not restarting: {reason}.")
                    self._say_words(ending)
                    return ending.code
                attempt += 1
                wait_seconds = min(backoff_seconds, LONGEST_BACKOFF_SECONDS)
                events.append("restart", what=ending.what, step=ending.step, wait_seconds=wait_seconds)
                self.say(f"{ending.what} Restarting in {wait_seconds:g} s ({attempt} of {self.max_restarts}).")
                self._sleep(wait_seconds)
                if self._stop_signals:
                    return PREEMPTED

    def _attempt(self, attempt: int, events: Events, guard: Guard) -> Ending:
        """Runs one attempt until all of its processes have ended."""
        time_account.record_last_heartbeat(events)
        heartbeat.remove(self.folder)
        if self.log is not None:
            self.log.start()
        processes = list(self.start(self.begun + attempt))
        guard.watch([process.pid for process in processes if isinstance(process, subprocess.Popen)])
        try:
            ending = self._watched(processes, events)
        finally:
            self._kill(processes)
            guard.watch([])
            if self.log is not None:
                self.log.finish()
        beats = heartbeat.read(self.folder).values()
        has_step = bool(beats) or not self.is_program
        return replace(ending, step=max((beat.step for beat in beats), default=0), has_step=has_step)

    def _watched(self, processes: Sequence[Process], events: Events) -> Ending:
        seen: dict[int, tuple[int | None, float]] = {}
        started_at = time.monotonic()
        stop_at: float | None = None
        ended_at: dict[int, float] = {}
        while True:
            codes = [process.poll() for process in processes]
            if all(code is not None for code in codes):
                return self._died(codes, events) if any(codes) else Ending(0, "done")
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, PREEMPTED)]
            if failed and stop_at is None:
                if None in codes:  # the process with the cause may end after one that waited for it
                    self._sleep(CAUSE_SECONDS)
                    codes = [process.poll() for process in processes]
                ending = self._died(codes, events)
                self._write_stacks(processes)
                return ending
            self._warn_of_ended(codes, ended_at)
            if self._stop_signals and stop_at is None:
                stop_at = time.monotonic() + self.limits.stop_seconds
                if self.is_program:  # it may ignore the signal
                    self.say(f"stopping within {self.limits.stop_seconds:g} s; signal again to stop now")
                for process in processes:
                    process.send_signal(signal.SIGTERM)
            if stop_at is not None and time.monotonic() > stop_at:
                return Ending(70, f"the processes did not stop within {self.limits.stop_seconds:g} s.")
            if silent := self._silent(seen, started_at):
                stopped = [silence.rank for silence in silent if _is_stopped(silence)]
                self._write_stacks(processes)
                first = min(silent, key=lambda silence: (silence.rank not in stopped, silence.step, silence.rank))
                ranks = [silence.rank for silence in silent]
                events.append("stuck", ranks=ranks, stopped=stopped, **asdict(first))
                return Ending(70, _stuck_text(first, ranks, stopped), first.rank)
            self._sleep(POLL_SECONDS)

    def _died(self, codes: Sequence[int | None], events: Events) -> Ending:
        ending = ending_of(codes, is_program=self.is_program)
        if ending.code != PREEMPTED:
            words = last_words(self.folder, ending.rank)
            events.append("died", rank=ending.rank, what=ending.what, code=ending.code, words=words)
            return ending if (codes[ending.rank] or 0) < 0 else replace(ending, words=words)
        return ending

    def _warn_of_ended(self, codes: Sequence[int | None], ended_at: dict[int, float]) -> None:
        """Warns once of each process that has ended with 0 while others still run."""
        now = time.monotonic()
        running = [rank for rank, code in enumerate(codes) if code is None]
        for rank, code in enumerate(codes):
            if code == 0 and running and now - ended_at.setdefault(rank, now) > ENDED_SECONDS:
                ended_at[rank] = float("inf")
                self.say(f"rank {rank} exited with code 0, while rank {running[0]} still runs.")

    def _silent(self, seen: dict[int, tuple[int | None, float]], started_at: float) -> list[Silence]:
        """Returns the silent ranks, once one of them has exceeded its limit; uses only this process's clock."""
        now = time.monotonic()
        is_late = False
        silent = []
        for rank, beat in heartbeat.read(self.folder).items():
            stamp = heartbeat.stamp(self.folder, rank)
            if seen.get(rank, (None, 0.0))[0] != stamp:
                seen[rank] = (stamp, now)
            seconds = now - seen[rank][1]
            limit_seconds = max(self.limits.stuck_seconds, STEP_FACTOR * beat.step_seconds)
            limit_seconds = limit_seconds if beat.phase == "step" else self.limits.quiet_seconds
            is_late = is_late or (beat.phase != "end" and seconds > limit_seconds)
            # Ranks that wait for it may have sent their last heartbeat before or after it.
            if beat.phase != "end" and seconds > limit_seconds / 2:
                silent.append(Silence(rank, beat.pid, beat.host, beat.phase, beat.step, round(seconds, 1)))
        if not seen and not self.is_program and now - started_at > self.limits.quiet_seconds:
            return [Silence(0, 0, "", "start", 0, round(now - started_at, 1))]
        return silent if is_late else []

    def _write_stacks(self, processes: Sequence[Process]) -> None:
        """Makes every live process dump its stacks to its log; a stopped process is continued first."""
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGCONT)
        if alive:
            time.sleep(STACKS_SECONDS)

    def _kill(self, processes: Sequence[Process]) -> None:
        children = [process for process in processes if isinstance(process, subprocess.Popen)]
        leaders = [process.pid for process in children]
        if any(process.poll() not in (0, PREEMPTED) for process in children):
            kill_all(leaders, os.getpid())
        elif left := started_by(leaders, os.getpid()):
            names = ", ".join(f"{name} ({pid})" for pid, name in sorted(left.items()))
            self.say(f"all ranks have ended, and processes that they started still run: {names}")
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()

    def _say_words(self, ended: Ending) -> None:
        if self.log is not None and self.log.rank == ended.rank:
            return  # they have been shown
        for line in last_words(self.folder, ended.rank).splitlines():
            self.say(f"rank {ended.rank}: {line}")

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stop_signals and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, POLL_SECONDS))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Records stop signals, which `_watched` passes on; a second signal raises KeyboardInterrupt."""

        def request_stop(number: int, frame: object) -> None:
            if self._stop_signals:
                raise KeyboardInterrupt
            self._stop_signals.append(number)

        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        previous = {number: signal.signal(number, request_stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _stuck_text(first: Silence, ranks: Sequence[int], stopped: Sequence[int]) -> str:
    subject = f"rank {first.rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    cause = f"; rank {first.rank} was stopped by a signal" if first.rank in stopped else ""
    return f"{subject} sent no heartbeat for {first.seconds:g} s in {first.phase}, after step {first.step}{cause}."


def _is_stopped(silence: Silence) -> bool:
    """Returns whether a process was stopped by a signal; False for another machine, or without /proc."""
    return silence.host == socket.gethostname() and state_of(silence.pid) == "T"


def as_flags(limits: Limits) -> list[str]:
    """Returns the flags that differ from their defaults.

    Example:
      >>> as_flags(Limits(restarts=5, stop_seconds=30.0))
      ['--stop-seconds', '30.0', '--restarts', '5']
    """
    changed = [(name, value) for name, value in asdict(limits).items() if value != getattr(Limits, name)]
    return [word for name, value in changed for word in (f"--{name.replace('_', '-')}", str(value))]
