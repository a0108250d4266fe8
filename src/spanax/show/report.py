"""Formats the report on a run as text."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from spanax.printable import printable
from spanax.show.live.events import RESUME, resume_for_longer
from spanax.show.tables import table_text
from spanax.train.record.report import RunReport
from spanax.train.record.time_account import TimeAccount
from spanax.train.record.time_ledger import BUCKETS

MEANING = {
    "step": "steps that count",
    "recomputed": "steps computed before and lost",
    "compile": "XLA compilation, including the first step",
    "data": "waiting for batches",
    "save": "steps blocked by a checkpoint",
    "restore": "reading a checkpoint",
    "evaluate": "evaluation on held-out data, and samples",
    "start": "imports, tracing, planning",
    "restart": "from a fault or preemption until steps resumed",
    "idle": "none of the above",
}
"""Description of each category of wall time."""

MAX_FAULTS = 40
"""Number of faults in the table, the newest ones."""

MAX_SAMPLES = 8
"""Number of samples in the table; all of them are on the page."""

MAX_LETTERS = 300
"""Number of letters shown of a recorded value."""

WIDTH = 140
"""The largest number of letters per line."""

METRIC_LABELS = {"step": "training", "eval": "held-out"}


def report_text(report: RunReport) -> str:
    """Returns a report as lines of text, the most important first."""
    times = report.account
    is_finished = times.attempts[-1].outcome == "finished"
    resume = resume_for_longer(RESUME, 2 * times.reached) if is_finished else RESUME
    return "\n".join(
        [
            *_time_lines(report),
            *_attempt_lines(times),
            *_fault_lines(times),
            *_metric_lines(report),
            *_sample_lines(report),
            _checkpoint_text(report),
            *_lines("could not be read", ("",), [(_text(note),) for note in report.notes]),
            f"{resume}: {printable(report.how_to_go_on)}",
        ]
    )


def _lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a title and a table below it; nothing without rows."""
    return [title, *(f"  {line}" for line in table_text(columns, rows, WIDTH - 2).splitlines())] if rows else []


def _time_lines(report: RunReport) -> list[str]:
    times = report.account
    rows = [
        (
            name,
            duration_text(times.seconds[name]),
            f"{100 * times.seconds[name] / times.wall_seconds:.1f} %",
            MEANING[name],
        )
        for name in BUCKETS
        if times.seconds[name] >= 0.05
    ]
    if times.paused_seconds:
        rows.append(("(paused)", duration_text(times.paused_seconds), "", "after the run finished or was stopped"))
    title = (
        f"{_text(report.workload) or 'a run'} in {printable(report.folder)}: {100 * times.goodput:.1f} % goodput, "
        f"{duration_text(times.seconds['step'])} of {duration_text(times.wall_seconds)} were steps that count"
    )
    return _lines(title, ("time in", "", "", ""), rows) or [title]


def _attempt_lines(times: TimeAccount) -> list[str]:
    """Returns when each attempt began, how long it lasted, how it ended, and on which devices."""
    rows = [
        (
            _date_text(attempt.began),
            duration_text(attempt.ended - attempt.began),
            attempt.outcome,
            f"{attempt.first_step}-{attempt.last_step}",
            _text(attempt.place.get("devices", "")),
            _values(attempt.place.get("mesh") or {}),
        )
        for attempt in times.attempts
    ]
    return _lines("attempts (UTC)", ("began", "lasted", "ended", "steps", "devices", "mesh"), rows)


def _fault_lines(times: TimeAccount) -> list[str]:
    """Returns the last faults of a run with the action taken."""
    count = len(times.faults)
    first = times.attempts[0].began
    shown = f", the last {MAX_FAULTS} of {count}" if count > MAX_FAULTS else ""
    rows = [(duration_text(event["time"] - first), *_fault_cells(event)) for event in times.faults[-MAX_FAULTS:]]
    return _lines(f"faults and recovery{shown}", ("after", "by", "event", ""), rows)


def _metric_lines(report: RunReport) -> list[str]:
    rows = [
        (METRIC_LABELS[kind], _text(values.get("step", "")), _values({k: v for k, v in values.items() if k != "step"}))
        for kind, values in report.metrics.last.items()
    ]
    return _lines("last metrics", ("", "step", "metrics"), rows)


def _sample_lines(report: RunReport) -> list[str]:
    samples = report.last_samples
    rows = [(_text(sample.prompt), _text(sample.text)) for sample in samples[:MAX_SAMPLES]]
    return _lines(f"samples of step {samples[0].step}", ("prompt", "text"), rows) if rows else []


def duration_text(seconds: float) -> str:
    """Returns a duration in seconds, minutes or hours."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _date_text(unix_seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # outside of the range of datetime
        return f"{unix_seconds:.3g} s"


def _fault_cells(event: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns the reporter of a fault, its kind, and its details; of a process's output, the last line."""
    named = ("event", "time", "by", "attempt", "what", "why", "words")
    sentences = [_text(event[key]) for key in ("what", "why") if key in event]
    sentences += [f"'{_text(line)}'" for line in str(event.get("words", "")).splitlines()[-1:]]
    values = _values({key: value for key, value in event.items() if key not in named})
    return _text(event.get("by", "")), _text(event["event"]), " ".join(filter(None, [*sentences, values]))


def _checkpoint_text(report: RunReport) -> str:
    checkpoint = report.checkpoint
    saving = "" if report.saving is None else f"; step {report.saving} is being saved"
    if checkpoint is None:
        return f"last checkpoint: none{saving}"
    unsaved = report.account.reached - checkpoint.step
    lost = f"; the {unsaved} steps after it are not saved" if unsaved > 0 else ""
    return f"last checkpoint: step {checkpoint.step}, {_text(checkpoint.when)}{lost}{saving}"


def _text(value: Any) -> str:
    return printable(value, MAX_LETTERS)


def _values(values: Any) -> str:
    if not isinstance(values, dict):
        return _text(values)
    return ", ".join(f"{_text(key)} {_text(value)}" for key, value in values.items())
