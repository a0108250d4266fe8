"""`spanax report` answered: how much of a run was training, what befell it, and how to go on.

A run folder is read into a Report, the report into sections, and those into text: another form takes the sections.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from spanax.entries.folder import Folder
from spanax.entries.names import CHECKPOINTS, EVENTS, METRICS
from spanax.errors import DataError, EntryError
from spanax.printable import printable
from spanax.run.record import heartbeat
from spanax.run.record.folder import read_settings
from spanax.run.record.time_account import TimeAccount, account
from spanax.run.record.time_ledger import BUCKETS
from spanax.run.store import view
from spanax.show.tables import table_text
from spanax.usage import resume_command

MEANING = {
    "step": "steps that count",
    "recomputed": "steps taken before and lost",
    "compile": "XLA, with the first step",
    "data": "waiting for batches",
    "save": "steps stopped for a checkpoint",
    "restore": "reading a checkpoint",
    "evaluate": "on held-out data",
    "start": "imports, tracing, planning",
    "restart": "from a fault until steps could go on",
    "idle": "none of these",
}

MOST = 40
"""How many faults are listed in words, the newest ones."""


MAX_NOTES = 8
"""So many unknown kinds of events and damaged heartbeats are listed."""

MAX_LETTERS = 300
"""So much of a recorded value is shown."""

RATES = ("step_seconds", "tokens_per_second", "examples_per_second", "data_wait_seconds")
MOMENTS = {"step": "training", "eval": "held-out"}


@dataclass(frozen=True)
class Report:
    """What is known of a run.

    Attributes:
      folder: the run folder.
      workload: its name; empty where the folder does not say.
      account: where its time went.
      checkpoint: the newest good one, if any.
      metrics: the metrics of the last logged step (`step`) and of the last evaluation (`eval`).
      notes: what of the folder could not be read, a line each.
      saving: the step that is being saved, if any.
    """

    folder: Path
    workload: str
    account: TimeAccount
    checkpoint: view.SavedStep | None
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    saving: int | None = None

    @property
    def how_to_go_on(self) -> str:
        """The command, or why none is needed."""
        outcome = self.account.attempts[-1].outcome
        if outcome == "running":
            return "it is running"
        return resume_command(self.folder, 2 * self.account.reached if outcome == "finished" else None)

    def to_json(self) -> dict[str, Any]:
        """The contract of `spanax report --json`."""
        saved = None if self.checkpoint is None else asdict(self.checkpoint)
        return {
            "folder": str(self.folder), "workload": self.workload, **self.account.to_json(), "checkpoint": saved,
            "saving": self.saving, "metrics": self.metrics, "notes": list(self.notes),
            "how_to_go_on": self.how_to_go_on,
        }  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A table with a title, or its title alone."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def report(folder: Path) -> Report:
    """Read a run folder, of a run that goes on or is over.

    Raises:
      DataError: it is not a run folder; also its kind EntryError.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{folder}'.", fix="the folder of a run, as spanax train --out names it")
    found, notes, workload = account(folder), list[str](), ""
    try:
        workload = str(read_settings(folder).get("workload", ""))
    except EntryError:
        raise
    except DataError as error:
        notes.append(" ".join(str(error).split()))  # a report is wanted most of runs that are damaged
    steps = view.describe(Folder.of(folder).inner(CHECKPOINTS))
    good = [saved for saved in steps if saved.state == "good"]
    saving = next((saved.step for saved in steps if saved.state == view.SAVING), None)
    metrics, num_damaged = _last_metrics(folder)
    notes += [
        f"{name}: {_counted(count)} damaged"
        for name, count in ((EVENTS, found.num_damaged), (METRICS, num_damaged))
        if count
    ]
    notes += [
        f"{EVENTS}: {_counted(count)} of the unknown kind '{kind}' left out"
        for kind, count in sorted(found.unknown.items())[:MAX_NOTES]
    ]
    notes += heartbeat.damaged(folder)[:MAX_NOTES]
    return Report(folder, workload, found, good[-1] if good else None, metrics, notes, saving)


def _counted(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"


def _last_metrics(folder: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The numbers of the last `step` and `eval` events of a run, and how many lines are damaged."""
    metrics: dict[str, dict[str, Any]] = {}
    num_damaged = 0
    for event in Folder.of(folder).lines(METRICS):
        if event is None:
            num_damaged += 1
        elif isinstance(kind := event.get("event"), str) and kind in MOMENTS:
            metrics[kind] = {key: event[key] for key in event if key not in (*RATES, "event")}
    return metrics, num_damaged


def sections(found: Report) -> list[Section]:
    """A report as titles and tables, most important first."""
    made, first = found.account, found.account.attempts[0].began
    head = (
        f"{_text(found.workload) or 'a run'} in {printable(found.folder)}: {100 * made.goodput:.1f} % goodput, "
        f"{duration_text(made.seconds['step'])} of {duration_text(made.wall_seconds)} were steps that count"
    )
    spent = [
        (
            name,
            duration_text(made.seconds[name]),
            f"{100 * made.seconds[name] / made.wall_seconds:.1f} %",
            MEANING[name],
        )
        for name in BUCKETS
        if made.seconds[name] >= 0.05
    ]
    if made.paused_seconds:
        spent.append(("(paused)", duration_text(made.paused_seconds), "", "between a finished run and its going on"))
    attempts = [
        (
            _when(one.began),
            duration_text(one.ended - one.began),
            one.outcome,
            f"{one.first_step}-{one.last_step}",
            _text(one.place.get("devices", "")),
            _values(one.place.get("mesh") or {}),
        )
        for one in made.attempts
    ]
    faults = [(duration_text(event["time"] - first), *_fault(event)) for event in made.faults[-MOST:]]
    metrics = [
        (MOMENTS[kind], _text(values.get("step", "")), _values({k: v for k, v in values.items() if k != "step"}))
        for kind, values in found.metrics.items()
    ]
    listed = f", the last {MOST} of {len(made.faults)}" if len(made.faults) > MOST else ""
    parts = [
        Section(head, ("time in", "", "", ""), spent),
        Section("attempts (UTC)", ("began", "lasted", "ended", "steps", "devices", "mesh"), attempts),
        Section(f"faults, and what was done{listed}", ("after", "by", "event", ""), faults) if faults else None,
        Section("last metrics", ("", "step", "metrics"), metrics) if metrics else None,
        Section(_checkpoint(found)),
        Section("could not be read", ("",), [(_text(note),) for note in found.notes]) if found.notes else None,
        Section(f"to go on: {printable(found.how_to_go_on)}"),
    ]
    return [part for part in parts if part is not None]


def report_text(parts: Iterable[Section], width: int = 140) -> str:
    """Sections as lines."""
    lines = []
    for part in parts:
        lines.append(part.title)
        if part.rows:
            table = Table(*part.columns, box=None, pad_edge=False, show_header=any(part.columns))
            for row in part.rows:
                table.add_row(*row)
            lines += ["  " + line for line in table_text(table, width - 2).splitlines()]
    return "\n".join(lines)


def duration_text(seconds: float) -> str:
    """A time for people.

    Example:
      >>> duration_text(2.25), duration_text(754), duration_text(93_784)
      ('2.2 s', '12 min 34 s', '26 h 03 min')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _when(unix_seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # a year that no calendar has
        return f"{unix_seconds:.3g} s"


def _fault(event: Mapping[str, Any]) -> tuple[str, str, str]:
    """Who told, of what, and with which sentences and values; of the last words of a process, the last line."""
    told = ("event", "time", "by", "attempt", "what", "why", "words")
    sentences = [_text(event[key]) for key in ("what", "why") if key in event]
    sentences += [f"'{_text(line)}'" for line in str(event.get("words", "")).splitlines()[-1:]]
    values = _values({key: value for key, value in event.items() if key not in told})
    return _text(event.get("by", "")), _text(event["event"]), " ".join(filter(None, [*sentences, values]))


def _checkpoint(found: Report) -> str:
    saved = found.checkpoint
    saving = "" if found.saving is None else f"; step {found.saving} is being saved"
    if saved is None:
        return f"last checkpoint: none{saving}"
    behind = found.account.reached - saved.step
    lost = f"; the {behind} steps after it are not saved" if behind > 0 else ""
    return f"last checkpoint: step {saved.step}, {_text(saved.when)}{lost}{saving}"


def _text(value: Any) -> str:
    return printable(value, MAX_LETTERS)


def _values(values: Any) -> str:
    if not isinstance(values, dict):
        return _text(values)
    return ", ".join(f"{_text(key)} {_text(value)}" for key, value in values.items())
