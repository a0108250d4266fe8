"""A pipeline schedule as a table: the task of each stage at each tick, and its buffer slots.

The table is the single source for execution, the bubble and diagrams.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spanax.displays import display
from spanax.plan.pipeline.schedules import KINDS, Kind, Task, orders
from spanax.plan.pipeline.timeline import StageSeconds, simulate
from spanax.plan.plan import Schedule

NONE = -1
"""In a table: no task, or no slot."""

COLUMNS = (
    "kind",
    "microbatch",
    "chunk",
    "kept",
    "received",
    "split",
    "seeds",
    "arrives_forward",
    "arrives_backward",
)
"""Columns per stage and tick: the task (`kind` indexes KINDS), its slots, and the slots of arriving values."""


_SHARE = re.compile(r"(\d+)_of_(\d+)_ticks/cond$")


def share_name(num_own: int, num_ticks: int) -> str:
    """Returns the name scope of a conditional task, which records the number of ticks in which it runs."""
    return f"{num_own}_of_{num_ticks}_ticks"


def share_of(op_name: str) -> tuple[int, int]:
    """Returns (ticks in which a branch of a compiled program runs, all ticks), from its name; (1, 1) by default.

    Example:
      >>> share_of("jit(step)/while/body/8_of_27_ticks/cond"), share_of("jit(step)/cond")
      ((8, 27), (1, 1))
    """
    match = _SHARE.search(op_name)
    return (int(match[1]), int(match[2])) if match else (1, 1)


@dataclass(frozen=True)
class Ticks:
    """A schedule as a table of ticks: all stages run one tick in lockstep, then send their results.

    A tick is one forward, one gradient of the input, or one gradient of the weights. A schedule without separate weight
    gradients runs them in the tick after, so that no stage waits for a longer task. `gpipe` runs all forwards first,
    and both gradients in one tick.

    Attributes:
      schedule: the name of the schedule.
      num_stages, num_microbatches, num_chunks: its counts.
      tasks: for each tick, the task of each stage, or None.

    Example:
      >>> print(ticks("gpipe", num_stages=2, num_microbatches=2))
      stage 0: F0 F1 .  .  B1 B0
      stage 1: .  F0 F1 B1 B0 .
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    tasks: tuple[tuple[Task | None, ...], ...]

    @property
    def num_ticks(self) -> int:
        """The number of ticks from the first task to the last."""
        return len(self.tasks)

    @property
    def num_idle(self) -> tuple[int, ...]:
        """The number of idle ticks of each stage."""
        return tuple(sum(row[stage] is None for row in self.tasks) for stage in range(self.num_stages))

    @property
    def bubble_fraction(self) -> float:
        """The fraction of the ticks of all stages that are idle."""
        return sum(self.num_idle) / (self.num_ticks * self.num_stages)

    def num_taken(self, kind: Kind) -> int:
        """Returns the number of ticks in which any stage has a task of a kind."""
        return sum(any(task is not None and task.kind == kind for task in row) for row in self.tasks)

    @property
    def is_split(self) -> bool:
        """Whether the gradients of weights have separate ticks."""
        return any(task is not None and task.kind == "W" for row in self.tasks for task in row)

    @cached_property
    def num_in_flight(self) -> int:
        """The peak number of microbatches (of one chunk each) whose activations a stage holds."""
        return self._slots["kept"][1]

    @cached_property
    def num_received(self) -> tuple[int, int]:
        """The peak numbers of buffered arrivals per stage: (activations, gradients of activations)."""
        return self._slots["forward"][1], self._slots["backward"][1]

    @cached_property
    def num_split(self) -> int:
        """The peak number of microbatches whose operands of pending weight gradients a stage holds."""
        return self._slots["split"][1]

    @property
    def num_parts(self) -> int:
        """The number of parts into which the layers are partitioned."""
        return self.num_stages * self.num_chunks

    @cached_property
    def table(self) -> np.ndarray:
        """The ticks as int32 [ticks, stages, COLUMNS], NONE for empty entries."""
        table = np.full((self.num_ticks, self.num_stages, len(COLUMNS)), NONE, np.int32)
        column = {label: index for index, label in enumerate(COLUMNS)}
        activations, forward, backward, split = (
            self._slots[label][0] for label in ("kept", "forward", "backward", "split")
        )
        for tick, row in enumerate(self.tasks):
            for stage, task in enumerate(row):
                if task is None:
                    continue
                part = task.chunk * self.num_stages + stage
                key = task.microbatch, part
                arrived = forward if task.kind == "F" else backward if task.kind == "B" else {}
                values = {
                    "kind": KINDS.index(task.kind),
                    "microbatch": task.microbatch,
                    "chunk": task.chunk,
                    "kept": activations[key],
                    "received": arrived.get(key, NONE),
                    "split": split.get(key, NONE),
                }
                for label, entry in values.items():
                    table[tick, stage, column[label]] = entry
                # A result reaches the next part at the end of this tick; the last part sends to itself.
                after = (task.microbatch, part + 1) if task.kind == "F" else (task.microbatch, part - 1)
                if task.kind == "F" and part + 1 == self.num_parts:
                    table[tick, stage, column["seeds"]] = backward[key]
                elif task.kind == "F":
                    table[tick, (stage + 1) % self.num_stages, column["arrives_forward"]] = forward[after]
                elif task.kind == "B" and part:
                    table[tick, (stage - 1) % self.num_stages, column["arrives_backward"]] = backward[after]
        return table

    @cached_property
    def _when(self) -> dict[tuple[Kind, int, int], int]:
        """The tick of every (kind, microbatch, part)."""
        return {
            (task.kind, task.microbatch, task.chunk * self.num_stages + stage): tick
            for tick, row in enumerate(self.tasks)
            for stage, task in enumerate(row)
            if task is not None
        }

    @cached_property
    def _slots(self) -> dict[str, tuple[dict[tuple[int, int], int], int]]:
        """For each kind of buffer, the slot of every (microbatch, part), and the number of slots per stage."""
        when, last = self._when, self.num_parts - 1
        pairs = [(m, part) for m in range(self.num_microbatches) for part in range(self.num_parts)]

        def spans(name: str) -> Iterable[tuple[tuple[int, int], int, int]]:
            for m, part in pairs:
                forward, backward = when["F", m, part], when["B", m, part]
                weights = when.get(("W", m, part), backward)
                if name == "kept":
                    yield (m, part), forward, weights
                elif name == "split" and weights > backward:
                    yield (m, part), backward, weights
                elif name == "forward" and part:
                    yield (m, part), when["F", m, part - 1], forward
                elif name == "backward":
                    yield (m, part), forward if part == last else when["B", m, part + 1], backward

        return {
            name: _slots(spans(name), self.num_stages, is_reused=name in ("forward", "backward"))
            for name in ("kept", "forward", "backward", "split")
        }

    def _repr_html_(self) -> str | None:
        return display(self)

    def __str__(self) -> str:
        cells = [[_cell(task, self.num_chunks) for task in stage] for stage in zip(*self.tasks, strict=True)]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(
            f"stage {stage}: " + " ".join(cell.ljust(width) for cell in row).rstrip() for stage, row in enumerate(cells)
        )


def ticks(schedule: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Ticks:
    """Returns the table of a schedule.

    Raises:
      SpanaxError: an unknown schedule, or unsupported counts.

    Example:
      >>> print(ticks("1f1b", num_stages=2, num_microbatches=2))
      stage 0: F0 F1 .  .  B0 W0 .  B1 W1
      stage 1: .  F0 B0 W0 F1 B1 W1 .  .
    """
    device_orders = orders(schedule, num_stages, num_microbatches, num_chunks)
    is_split = schedule != "gpipe"
    weight_ticks = 1.0 if is_split else 0.0
    timeline = simulate(device_orders, StageSeconds.equal(num_stages * num_chunks, 1.0, 1.0, weight_ticks))
    placed: list[dict[int, Task]] = []
    for order, starts in zip(device_orders, timeline.start_seconds, strict=True):
        separate = {(task.microbatch, task.chunk) for task in order if task.kind == "W"}
        cells: dict[int, Task] = {}
        for task, start in zip(order, starts, strict=True):
            cells[round(start)] = task
            if is_split and task.kind == "B" and (task.microbatch, task.chunk) not in separate:
                cells[round(start) + 1] = Task("W", task.microbatch, task.chunk)
        placed.append(cells)
    num_ticks = 1 + max(max(cells) for cells in placed)
    rows = tuple(tuple(cells.get(tick) for cells in placed) for tick in range(num_ticks))
    return Ticks(schedule, num_stages, num_microbatches, num_chunks, rows)


def ticks_of(schedule: Schedule) -> Ticks:
    """Returns the table of a plan's schedule.

    Raises:
      SpanaxError: an unknown schedule, or unsupported counts.
    """
    return ticks(schedule.pipeline, schedule.num_stages, schedule.microbatches, schedule.num_chunks)


def _slots(
    spans: Iterable[tuple[tuple[int, int], int, int]], num_stages: int, *, is_reused: bool
) -> tuple[dict[tuple[int, int], int], int]:
    """Returns a free slot for each span of ticks; with `is_reused`, a slot is free again within its last tick."""
    free_from: list[list[int]] = [[] for _ in range(num_stages)]
    slot_of: dict[tuple[int, int], int] = {}
    for key, first, last in sorted(spans, key=lambda span: span[1]):
        slots = free_from[key[1] % num_stages]
        slot = next((slot for slot, free in enumerate(slots) if free <= first), len(slots))
        slots[slot : slot + 1] = [last if is_reused else last + 1]
        slot_of[key] = slot
    return slot_of, max(map(len, free_from))


def _cell(task: Task | None, num_chunks: int) -> str:
    if task is None:
        return "."
    return f"{task.kind}{task.microbatch}" + (f".{task.chunk}" if num_chunks > 1 else "")
