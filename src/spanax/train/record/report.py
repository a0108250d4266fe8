"""Reads a run folder into a `RunReport`: its time account, last checkpoint, last metrics, and the command to resume."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import CHECKPOINTS, EVENTS, METRICS, SAMPLES
from spanax.errors import DataError, EntryError, MissingFileError
from spanax.train.record import heartbeat
from spanax.train.record.folder import recorded
from spanax.train.record.metric_curves import MetricCurves, metric_curves
from spanax.train.record.samples import Sample, read_samples
from spanax.train.record.time_account import TimeAccount, account
from spanax.train.store import view
from spanax.usage import resume_command

MAX_NOTES = 8
"""Number of unknown event kinds and of damaged heartbeats in a report."""


@dataclass(frozen=True)
class RunReport:
    """Summary of a run, finished or not.

    Attributes:
      folder: the run folder.
      workload: name of the workload; empty if the folder does not record one.
      account: wall time by category.
      checkpoint: the newest intact checkpoint, or None.
      metrics: its metrics over steps.
      notes: files and lines that could not be read, one line per problem.
      saving: the step of a checkpoint that is being written, or None.
      samples: what the model generated, the last step last.
    """

    folder: Path
    workload: str
    account: TimeAccount
    checkpoint: view.SavedStep | None
    metrics: MetricCurves = field(default_factory=MetricCurves)
    notes: Sequence[str] = ()
    saving: int | None = None
    samples: Sequence[Sample] = ()

    @property
    def last_samples(self) -> list[Sample]:
        """The samples of the last step that has some."""
        return [sample for sample in self.samples if sample.step == self.samples[-1].step]

    @property
    def how_to_go_on(self) -> str:
        """The command that resumes the run; `it is running` if none is needed."""
        outcome = self.account.attempts[-1].outcome
        if outcome == "running":
            return "it is running"
        return resume_command(self.folder, 2 * self.account.reached if outcome == "finished" else None)

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `spanax report --json` prints."""
        checkpoint = None if self.checkpoint is None else asdict(self.checkpoint)
        return {
            "folder": str(self.folder),
            "workload": self.workload,
            **self.account.to_json(),
            "checkpoint": checkpoint,
            "saving": self.saving,
            "metrics": self.metrics.last,
            "samples": [asdict(sample) for sample in self.last_samples],
            "notes": list(self.notes),
            "how_to_go_on": self.how_to_go_on,
        }


def run_report(folder: Path) -> RunReport:
    """Returns the report on a run folder, also while the run is writing to it.

    Raises:
      DataError: the folder is not a run folder.
      EntryError: an entry of the folder is a link or has another unexpected type.
    """
    if not folder.is_dir():
        raise MissingFileError(
            f"folder '{folder}' does not exist.", fix="a run folder: the --output-dir of spanax train"
        )
    times = account(folder)
    notes = list[str]()
    workload = ""
    try:
        workload = str(recorded(folder).get("workload", ""))
    except EntryError:
        raise
    except DataError as error:
        notes.append(" ".join(str(error).split()))  # damaged runs need a report most
    steps = view.describe(Folder.of(folder).inner(CHECKPOINTS))
    intact = [saved for saved in steps if saved.state == "good"]
    saving = next((saved.step for saved in steps if saved.state == view.SAVING), None)
    metrics = metric_curves(folder)
    samples, num_damaged = read_samples(folder)
    damaged = {EVENTS: times.num_damaged, METRICS: metrics.num_damaged, SAMPLES: num_damaged}
    notes += [f"{name}: {_num_lines(count)} damaged" for name, count in damaged.items() if count]
    notes += [
        f"{EVENTS}: {_num_lines(count)} of the unknown kind '{kind}' left out"
        for kind, count in sorted(times.unknown.items())[:MAX_NOTES]
    ]
    if times.is_tail:
        notes.append(f"{EVENTS}: only the last events were read")
    notes += heartbeat.damaged(folder)[:MAX_NOTES]
    return RunReport(folder, workload, times, intact[-1] if intact else None, metrics, notes, saving, samples)


def _num_lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"
