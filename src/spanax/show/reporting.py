"""`spanax report` answered: how much of a run was training, what befell it, and how to go on.

A run folder is read into a Report, the report into sections, and those into text: another form takes the sections.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from spanax.documents import json_lines
from spanax.errors import DataError
from spanax.run.record.account import Account, Event, account
from spanax.run.record.folder import CHECKPOINTS, CONFIG, METRICS, read_config
from spanax.run.record.ledger import BUCKETS
from spanax.run.store import view
from spanax.show.tables import plain_text, table_text
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
      saving: the step that is being saved, if any.
    """

    folder: Path
    workload: str
    account: Account
    checkpoint: view.Saved | None
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
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
            "saving": self.saving, "metrics": self.metrics, "how_to_go_on": self.how_to_go_on,
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
      DataError: it is not a run folder.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{folder}'.", fix="the folder of a run, as spanax train --out names it")
    found = account(folder)
    try:
        workload = str(read_config(folder / CONFIG).get("workload", ""))
    except DataError:
        workload = ""  # a report is wanted most of runs that are not whole
    steps = view.describe(folder / CHECKPOINTS)
    good = [saved for saved in steps if saved.state == "good"]
    saving = next((saved.step for saved in steps if saved.state == view.SAVING), None)
    return Report(folder, workload, found, good[-1] if good else None, _last_metrics(folder / METRICS), saving)


def _last_metrics(path: Path) -> dict[str, dict[str, Any]]:
    """The numbers of the last `step` and `eval` events of a run."""
    found: dict[str, dict[str, Any]] = {}
    for event in json_lines(path) if path.is_file() else ():
        if event.get("event") in ("step", "eval"):
            found[str(event["event"])] = {key: event[key] for key in event if key not in (*RATES, "event")}
    return found


def sections(found: Report) -> list[Section]:
    """A report as titles and tables, most important first."""
    made, first = found.account, found.account.attempts[0].began
    head = (
        f"{found.workload or 'a run'} in {found.folder}: {100 * made.goodput:.1f} % goodput, "
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
            plain_text(one.place.get("devices", "")),
            _values(one.place.get("mesh") or {}),
        )
        for one in made.attempts
    ]
    faults = [(duration_text(event.get("time", first) - first), *_fault(event)) for event in made.faults[-MOST:]]
    metrics = [
        (MOMENTS[kind], plain_text(values.get("step", "")), _values({k: v for k, v in values.items() if k != "step"}))
        for kind, values in found.metrics.items()
    ]
    listed = f", the last {MOST} of {len(made.faults)}" if len(made.faults) > MOST else ""
    parts = [
        Section(head, ("time in", "", "", ""), spent),
        Section("attempts (UTC)", ("began", "lasted", "ended", "steps", "devices", "mesh"), attempts),
        Section(f"faults, and what was done{listed}", ("after", "by", "event", ""), faults) if faults else None,
        Section("last metrics", ("", "step", "metrics"), metrics) if metrics else None,
        Section(_checkpoint(found)),
        Section(f"to go on: {found.how_to_go_on}"),
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
                # What a file says is text, and never a mark for rich.
                table.add_row(*(Text(cell) for cell in row))
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


def _fault(event: Event) -> tuple[str, str, str]:
    """Who told, of what, and with which sentences and values; of the last words of a process, the last line."""
    told = ("event", "time", "by", "attempt", "what", "why", "words")
    sentences = [plain_text(event[key]) for key in ("what", "why") if key in event]
    sentences += [f"'{plain_text(line)}'" for line in str(event.get("words", "")).splitlines()[-1:]]
    values = _values({key: value for key, value in event.items() if key not in told})
    return plain_text(event.get("by", "")), plain_text(event["event"]), " ".join(filter(None, [*sentences, values]))


def _checkpoint(found: Report) -> str:
    saved = found.checkpoint
    saving = "" if found.saving is None else f"; step {found.saving} is being saved"
    if saved is None:
        return f"last checkpoint: none{saving}"
    behind = found.account.reached - saved.step
    lost = f"; the {behind} steps after it are not saved" if behind > 0 else ""
    return f"last checkpoint: step {saved.step}, {saved.when}{lost}{saving}"


def _values(values: Any) -> str:
    if not isinstance(values, dict):
        return plain_text(values)
    return ", ".join(f"{plain_text(key)} {plain_text(value)}" for key, value in values.items())
