"""Metrics and trackers for a custom training loop."""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spanax.documents import json_line
from spanax.entries.folder import Folder
from spanax.entries.local_path import local_path
from spanax.entries.names import CHECKPOINTS, METRICS, TENSORBOARD
from spanax.errors import ConflictError
from spanax.printable import to_stderr
from spanax.processes.processes import is_first
from spanax.train.evaluation import by_name
from spanax.train.record import folder as run_folder
from spanax.train.record.run_lock import claimed
from spanax.train.record.tensorboard import TensorBoard
from spanax.train.record.trackers import RunInfo, Trackers, check_trackers
from spanax.train.record.wandb import WeightsAndBiases
from spanax.train.store import manifest

if TYPE_CHECKING:
    from spanax.train.run import Run


def create_trackers(names: str | Sequence[Any] | None) -> dict[str, Any]:
    """Returns trackers by name, given names and tracker objects."""
    listed = names.split(",") if isinstance(names, str) else list(names or ())
    custom = {type(tracker).__name__: tracker for tracker in listed if not isinstance(tracker, str)}
    names = check_trackers(",".join(name for name in listed if isinstance(name, str)))
    return {name: TensorBoard() if name == TENSORBOARD else WeightsAndBiases() for name in names} | custom


@dataclass(eq=False)
class Tracking:
    """Logs the steps of a custom training loop; returned by `track`."""

    _metrics: Any
    _trackers: Trackers | None
    _pending: deque[tuple[str, int, Any]] = field(default_factory=deque)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the metrics of one step; arrays are fetched at the next call, so that the devices need not wait.

        Args:
          step: the number of the step.
          metrics: numbers and arrays by name, such as the result of `nnx.MultiMetric.compute()`; in nested dicts,
            names are joined by dots. Trackers receive the scalars.
        """
        self._pending.append(("step", step, metrics))
        self._write(num_pending=1)

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the metrics of an evaluation after a step, each with the prefix `val_`; see `log`."""
        self._pending.append(("eval", step, {f"val_{name}": value for name, value in metrics.items()}))
        self._write(num_pending=1)

    def back(self, step: int) -> None:
        """Logs that the loop returned to an earlier step and continues after it."""
        self._write(num_pending=0)
        if self._trackers is not None:
            self._trackers.take({"event": "rolled_back", "step": step})

    def finish(self) -> None:
        """Logs the last step."""
        self._write(num_pending=0)

    def _write(self, num_pending: int) -> None:
        import numpy as np

        while len(self._pending) > num_pending:
            kind, step, metrics = self._pending.popleft()
            if self._trackers is None:
                continue
            values = {name: np.asarray(value).tolist() for name, value in by_name(metrics).items()}
            event = {"event": kind, "step": step} | values | {"event": kind, "step": step}
            self._metrics.write(json_line(event))
            self._trackers.take(event)


@contextmanager
def track(
    trackers: str | Sequence[Any],
    folder: str | os.PathLike[str],
    run: "Run | None" = None,
    *,
    step: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Tracking]:
    """Writes `metrics.jsonl` for a custom training loop and logs to trackers, as `spanax train --track` does.

    In a run of several processes, each of them calls this; only the first one logs. A resumed run appends to the
    metrics and to each tracker's record of the same folder.

    Args:
      trackers: `"tensorboard"`, `"wandb"`, `"tensorboard,wandb"`, or a list of names and of objects with the methods of
        `spanax.train.record.trackers.Tracker`; empty for `metrics.jsonl` alone.
      folder: the folder for `metrics.jsonl` and the files of the trackers.
      run: the run to track; its plan is logged, and its step determines where logging continues.
      step: for a loop without a Run, the step that it continues after, such as that of `Checkpoints.restore`: later
        lines of `metrics.jsonl` are removed; with 0, those of a loop that ended before it saved a step. None for a new
        loop in a new folder.
      settings: JSON values to log once, such as hyperparameters.

    Raises:
      SpanaxError: a tracker is unknown or not installed, or both `run` and `step` are passed.
      EntryError: the folder contains something other than regular files and folders.
      WriteError: the folder is in use, or contains a run although this one is new.

    Example:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> with track("", folder) as tracking:
      ...     tracking.log(1, {"loss": 2.5})
      >>> (folder / "metrics.jsonl").read_text()
      '{"event": "step", "step": 1, "loss": 2.5}\\n'
    """
    if run is not None and step is not None:
        raise ConflictError("`step` is that of the run.", where=f"step {run.num_steps}", fix="omit step=...")
    named = create_trackers(trackers)
    if not is_first():
        yield Tracking(None, None)
        return
    place = local_path(folder)
    last = (step or 0) if run is None else run.num_steps
    is_resumed = last > 0 or (step is not None and not any(manifest.steps(Folder.of(place).inner(CHECKPOINTS))))
    with claimed(place, resume=is_resumed):
        numbers = (event.get("step") for event in Folder.of(place).lines(METRICS) if event is not None)
        reached = max((number for number in numbers if isinstance(number, int)), default=0)
        metrics = run_folder.open_metrics(place, last)

        def warn(line: str) -> None:
            metrics.write(json_line({"event": "warning", "message": line}))
            to_stderr(line)

        about = RunInfo(place, dict(settings or {}), {} if run is None else summary(run), last, reached)
        active = Trackers(named, about, warn)
        active.begin()
        tracking = Tracking(metrics, active)
        try:
            yield tracking
        finally:
            tracking.finish()
            active.end()


def summary(run: "Run") -> dict[str, Any]:
    """Returns the layout, the mesh and the sizes of a run, as JSON values."""
    plan = run.plan
    name = plan.schedule.quantize
    quantized = {"quantize": name, "quantized": list(run.program.quantized)} if name else {}
    trained = {"trained_parameters": run.program.num_trained} if run.program.frozen else {}
    return {
        **quantized,
        **trained,
        "parameters": run.program.num_params,
        "layout": plan.layout.name,
        "mesh": dict(plan.mesh.axes),
        "devices": plan.mesh.size,
        "why": plan.why,
        "state_bytes_per_device": plan.state_bytes(),
    }
