"""Tracking: the trackers and the metrics.jsonl of a loop of one's own."""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanax.documents import json_line
from spanax.entries.folder import Folder
from spanax.entries.names import METRICS, TENSORBOARD
from spanax.printable import to_stderr
from spanax.run.distributed.processes import is_first
from spanax.run.record import folder as run_folder
from spanax.run.record.run_lock import claimed
from spanax.run.record.tensorboard import TensorBoard
from spanax.run.record.trackers import RunInfo, Trackers, check_trackers
from spanax.run.record.wandb import WeightsAndBiases

if TYPE_CHECKING:
    from spanax.run.run import Run


def made(names: str | Sequence[Any] | None) -> dict[str, Any]:
    """Trackers by name, from names and from trackers of one's own."""
    listed = names.split(",") if isinstance(names, str) else list(names or ())
    own = {type(one).__name__: one for one in listed if not isinstance(one, str)}
    named = check_trackers(",".join(one for one in listed if isinstance(one, str)))
    return {name: TensorBoard() if name == TENSORBOARD else WeightsAndBiases() for name in named} | own


@dataclass(eq=False)
class Tracking:
    """What a loop of one's own tells of its steps; made by `track`."""

    _metrics: Any
    _trackers: Trackers | None
    _behind: deque[tuple[int, Any]] = field(default_factory=deque)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers of one step; arrays are fetched when the next step is told of, so that no device waits for it."""
        self._behind.append((step, metrics))
        self._tell(num_left=1)

    def back(self, step: int) -> None:
        """The loop goes on behind an earlier step."""
        self._tell(num_left=0)
        if self._trackers is not None:
            self._trackers.take({"event": "rolled_back", "step": step})

    def finish(self) -> None:
        """Tell of the last step."""
        self._tell(num_left=0)

    def _tell(self, num_left: int) -> None:
        import numpy as np

        while len(self._behind) > num_left:
            step, metrics = self._behind.popleft()
            if self._trackers is None:
                continue
            values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
            event = {"event": "step", "step": step, **values}
            self._metrics.write(json_line(event))
            self._trackers.take(event)


@contextmanager
def track(
    trackers: str | Sequence[Any],
    folder: str | os.PathLike[str],
    run: "Run",
    *,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Tracking]:
    """Tell trackers of a loop of one's own, and write its `metrics.jsonl`, as `spanax train --track` does.

    In a run of several processes each of them calls this, and the first one tells. A run that goes on in the same
    folder goes on in the same place of each tracker.

    Args:
      trackers: `"tensorboard"`, `"wandb"`, both with a comma, or a list of names and of objects with the methods of
        `spanax.run.record.trackers.Tracker`; empty for `metrics.jsonl` alone.
      folder: where `metrics.jsonl` and what trackers keep are written.
      run: what is tracked: its plan is told, and it says where the steps go on.
      settings: what else is to be told once, as JSON values.

    Raises:
      SpanaxError: a tracker is unknown or not installed.
      EntryError: something other than a regular file or folder is in the folder.
      WriteError: the folder is in use, or already holds a run and this one is new.

    Example:
      >>> import tempfile
      >>> from types import SimpleNamespace
      >>> from spanax.hardware.mesh import MeshShape
      >>> layout = SimpleNamespace(name="fsdp")
      >>> plan = SimpleNamespace(layout=layout, mesh=MeshShape.of("fsdp=8"), why="it fits", state_bytes=lambda: 80)
      >>> run = SimpleNamespace(plan=plan, num_steps=0, program=SimpleNamespace(num_params=20))
      >>> folder = Path(tempfile.mkdtemp())
      >>> with track("", folder, run) as tracking:
      ...     tracking.log(1, {"loss": 2.5})
      >>> (folder / "metrics.jsonl").read_text()
      '{"event": "step", "step": 1, "loss": 2.5}\\n'
    """
    named = made(trackers)
    if not is_first():
        yield Tracking(None, None)
        return
    place = Path(folder)
    with claimed(place, resume=run.num_steps > 0):
        steps = (event.get("step") for event in Folder.of(place).lines(METRICS) if event is not None)
        reached = max((step for step in steps if isinstance(step, int)), default=0)
        metrics = run_folder.open_metrics(place, run.num_steps)

        def warn(line: str) -> None:
            metrics.write(json_line({"event": "warning", "message": line}))
            to_stderr(line)

        about = RunInfo(place, dict(settings or {}), summary(run), run.num_steps, reached)
        told = Trackers(named, about, warn)
        told.begin()
        tracking = Tracking(metrics, told)
        try:
            yield tracking
        finally:
            tracking.finish()
            told.end()


def summary(run: "Run") -> dict[str, Any]:
    """What was planned for a run, in a few numbers."""
    plan = run.plan
    return {
        "parameters": run.program.num_params,
        "layout": plan.layout.name,
        "mesh": dict(plan.mesh.axes),
        "devices": plan.mesh.size,
        "why": plan.why,
        "state_bytes_per_device": plan.state_bytes(),
    }
