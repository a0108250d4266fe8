"""A pipeline schedule as a table: which task each stage runs at each tick, and which buffer slot it uses.

The table is the single source for execution, for the bubble and for drawings.
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
"""In a table: no task, or nothing to keep."""

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
"""Of one stage at one tick: its task (`kind` counts in KINDS), the slots it works in, and those for what arrives."""


_SHARE = re.compile(r"(\d+)_of_(\d+)_ticks/cond$")


def share_name(num_own: int, num_ticks: int) -> str:
    """The name under which the program takes a kind of task, so that a reader knows how often it does."""
    return f"{num_own}_of_{num_ticks}_ticks"


def share_of(op_name: str) -> tuple[int, int]:
    """In how many of how many ticks a branch of a compiled program is taken, by its name; (1, 1) of any other.

    Example:
      >>> share_of("jit(step)/while/body/8_of_27_ticks/cond"), share_of("jit(step)/cond")
      ((8, 27), (1, 1))
    """
    found = _SHARE.search(op_name)
    return (int(found[1]), int(found[2])) if found else (1, 1)


@dataclass(frozen=True)
class Ticks:
    """A schedule as a table of ticks: all stages take one tick together, then hand on what they have made.

    A tick is one forward, one gradient of the input, or one gradient of the weights; where a schedule does not tell the
    last two apart they follow each other, so that no stage waits for another's longer task. `gpipe` has all forwards
    first, and takes both gradients in one tick.

    Attributes:
      schedule: its name.
      num_stages, num_microbatches, num_chunks: of what it is.
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
        """From the first task to the last."""
        return len(self.tasks)

    @property
    def num_idle(self) -> tuple[int, ...]:
        """For each stage, the ticks in which it has nothing to do."""
        return tuple(sum(row[stage] is None for row in self.tasks) for stage in range(self.num_stages))

    @property
    def bubble_fraction(self) -> float:
        """The share of all ticks of all stages that are idle."""
        return sum(self.num_idle) / (self.num_ticks * self.num_stages)

    def num_taken(self, kind: Kind) -> int:
        """In how many ticks any stage has a task of a kind."""
        return sum(any(task is not None and task.kind == kind for task in row) for row in self.tasks)

    @property
    def is_split(self) -> bool:
        """Whether the gradients of weights have ticks of their own."""
        return any(task is not None and task.kind == "W" for row in self.tasks for task in row)

    @cached_property
    def num_kept(self) -> int:
        """For how many microbatches (of one chunk each) a stage keeps activations at once, at most."""
        return self._slots["kept"][1]

    @cached_property
    def num_received(self) -> tuple[int, int]:
        """How many arrivals wait at a stage at most: activations, and their gradients."""
        return self._slots["forward"][1], self._slots["backward"][1]

    @cached_property
    def num_split(self) -> int:
        """For how many microbatches a stage keeps what the gradients of weights still need, at most."""
        return self._slots["split"][1]

    @property
    def num_parts(self) -> int:
        """Into how many parts the layers are divided."""
        return self.num_stages * self.num_chunks

    @cached_property
    def table(self) -> np.ndarray:
        """The ticks in numbers, for COLUMNS: int32 [ticks, stages, columns], NONE where there is nothing."""
        table = np.full((self.num_ticks, self.num_stages, len(COLUMNS)), NONE, np.int32)
        column = {name: at for at, name in enumerate(COLUMNS)}
        kept, forward, backward, split = (self._slots[name][0] for name in ("kept", "forward", "backward", "split"))
        for tick, row in enumerate(self.tasks):
            for stage, task in enumerate(row):
                if task is None:
                    continue
                part = task.chunk * self.num_stages + stage
                at = task.microbatch, part
                arrived = forward if task.kind == "F" else backward if task.kind == "B" else {}
                told = {
                    "kind": KINDS.index(task.kind),
                    "microbatch": task.microbatch,
                    "chunk": task.chunk,
                    "kept": kept[at],
                    "received": arrived.get(at, NONE),
                    "split": split.get(at, NONE),
                }
                for name, value in told.items():
                    table[tick, stage, column[name]] = value
                # What is made here is there for the next part, at the end of this tick; the last part hands to itself.
                after = (task.microbatch, part + 1) if task.kind == "F" else (task.microbatch, part - 1)
                if task.kind == "F" and part + 1 == self.num_parts:
                    table[tick, stage, column["seeds"]] = backward[at]
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
        """For each kind of storage, the slot of every (microbatch, part), and how many slots a stage needs."""
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
    """The table of a schedule.

    Raises:
      SpanaxError: an unknown schedule, or counts that it cannot take.

    Example:
      >>> print(ticks("1f1b", num_stages=2, num_microbatches=2))
      stage 0: F0 F1 .  .  B0 W0 .  B1 W1
      stage 1: .  F0 B0 W0 F1 B1 W1 .  .
    """
    found = orders(schedule, num_stages, num_microbatches, num_chunks)
    is_split = schedule != "gpipe"
    weight_ticks = 1.0 if is_split else 0.0
    timeline = simulate(found, StageSeconds.equal(num_stages * num_chunks, 1.0, 1.0, weight_ticks))
    placed: list[dict[int, Task]] = []
    for order, starts in zip(found, timeline.start_seconds, strict=True):
        apart = {(task.microbatch, task.chunk) for task in order if task.kind == "W"}
        cells: dict[int, Task] = {}
        for task, start in zip(order, starts, strict=True):
            cells[round(start)] = task
            if is_split and task.kind == "B" and (task.microbatch, task.chunk) not in apart:
                cells[round(start) + 1] = Task("W", task.microbatch, task.chunk)
        placed.append(cells)
    num_ticks = 1 + max(max(cells) for cells in placed)
    rows = tuple(tuple(cells.get(tick) for cells in placed) for tick in range(num_ticks))
    return Ticks(schedule, num_stages, num_microbatches, num_chunks, rows)


def ticks_of(schedule: Schedule) -> Ticks:
    """The table of a plan's schedule.

    Raises:
      SpanaxError: an unknown schedule, or counts that it cannot take.
    """
    return ticks(schedule.pipeline, schedule.num_stages, schedule.microbatches, schedule.num_chunks)


def _slots(
    spans: Iterable[tuple[tuple[int, int], int, int]], num_stages: int, *, is_reused: bool
) -> tuple[dict[tuple[int, int], int], int]:
    """A slot for each span of ticks, of those of its stage that are free; `is_reused`: also within its last tick."""
    free_from: list[list[int]] = [[] for _ in range(num_stages)]
    found: dict[tuple[int, int], int] = {}
    for at, first, last in sorted(spans, key=lambda span: span[1]):
        slots = free_from[at[1] % num_stages]
        slot = next((slot for slot, free in enumerate(slots) if free <= first), len(slots))
        slots[slot : slot + 1] = [last if is_reused else last + 1]
        found[at] = slot
    return found, max(map(len, free_from))


def _cell(task: Task | None, num_chunks: int) -> str:
    if task is None:
        return "."
    return f"{task.kind}{task.microbatch}" + (f".{task.chunk}" if num_chunks > 1 else "")
