"""The event sink of a training run, with the wall-time ledger and the heartbeat of its process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spanax.documents import json_line
from spanax.errors import WriteError
from spanax.train.record import folder as run_folder
from spanax.train.record import time_account
from spanax.train.record.events import Events
from spanax.train.record.heartbeat import Pulse
from spanax.train.record.time_ledger import Ledger, process_age_seconds
from spanax.train.record.trackers import RunInfo, Trackers

Event = dict[str, Any]

INTERNAL = ("begin", "replanned", "end", "ledger")
"""Kinds of events written to events.jsonl alone."""

RECORDED = ("bad_step", "skipped", "rolled_back", "save_failed")
"""Kinds of events written to events.jsonl in addition to metrics.jsonl."""

SAMPLE = "sample"
"""The kind of event written to samples.jsonl instead of metrics.jsonl."""


@dataclass(eq=False)
class Telemetry:
    """Writes the events of a run to its .jsonl files, its trackers and the caller's callback.

    Only the first process of a run writes events. Every process has its own ledger and heartbeat.

    Attributes:
      folder: the run folder.
      ledger: the wall time of this process by bucket.
      emit: the caller's callback for events; None on every process but the first.

    Example:
      >>> import tempfile
      >>> with open_telemetry(Path(tempfile.mkdtemp()), rank=0, attempt=0, emit=print) as telemetry:
      ...     telemetry.warn("the disk is almost full")
      {'event': 'warning', 'message': 'the disk is almost full'}
    """

    folder: Path
    ledger: Ledger
    emit: Callable[[Event], None] | None
    _events: Events
    _pulse: Pulse
    _metrics: run_folder.AppendLog | None = field(default=None, init=False)
    _samples: run_folder.AppendLog | None = field(default=None, init=False)
    _trackers: Trackers | None = field(default=None, init=False)

    def begin(self, info: RunInfo, trackers: dict[str, Any]) -> None:
        """Opens metrics.jsonl and samples.jsonl after step `info.step`, and passes events to the trackers."""
        self._open(info.step)
        self._trackers = Trackers(trackers, info, self.warn)

    def _open(self, step: int) -> None:
        self._metrics = run_folder.open_metrics(self.folder, step)
        self._samples = run_folder.open_samples(self.folder, step)

    def report(self, event: Event) -> None:
        """Writes one event; a full disk raises no error."""
        if self.emit is None:
            return
        kind = event["event"]
        if kind in INTERNAL:
            self._events.append(**event)
            return
        if kind == "rolled_back":
            with suppress(WriteError):  # a full disk keeps the lines of steps that are repeated
                self._open(event["step"])
        log = self._samples if kind == SAMPLE else self._metrics
        if log is not None:
            log.write(json_line(event))
        if kind in RECORDED:
            self._events.append(**event)
        try:
            self.emit(event)
        except BrokenPipeError:
            raise
        except OSError:
            pass  # standard output may be a file on the same full disk; the metrics have it
        if self._trackers is not None:
            self._trackers.take(event)

    def warn(self, message: str) -> None:
        """Reports a warning."""
        self.report({"event": "warning", "message": message})

    def beat(self, phase: str, step: int, *, step_seconds: float = 0.0) -> None:
        """Writes a heartbeat with the ledger's seconds."""
        self._pulse.beat(phase, step, step_seconds=step_seconds, seconds=self.ledger.seconds())

    def finish(self, last: Event, step: int) -> None:
        """Reports the last event of a run that ended at `step`, and closes its ledger."""
        self.ledger.enter("idle")
        self.report(last)
        self.report({"event": "end", "how": last["event"], "step": step})
        self.report({"event": "ledger", **self.ledger.record(step)})
        self.beat("end", step)


@contextmanager
def open_telemetry(
    folder: Path, *, rank: int, attempt: int, emit: Callable[[Event], None] | None
) -> Iterator[Telemetry]:
    """Opens the telemetry of one process; the time of an earlier attempt that was killed is recorded first.

    `rank` is the index of this process, `attempt` the number of restarts of the run so far.
    """
    ledger = Ledger(attempt, time_account.reached(folder), process_age_seconds())
    events = Events(folder, attempt=attempt)
    if emit is not None:
        time_account.record_last_heartbeat(events)
    telemetry = Telemetry(folder, ledger, emit, events, Pulse(folder, rank, attempt))
    telemetry.beat("start", 0)
    try:
        yield telemetry
    finally:
        if telemetry._trackers is not None:
            telemetry._trackers.end()
