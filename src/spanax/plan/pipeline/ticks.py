"""A pipeline schedule as a table: the task of each stage at each tick, and its buffer slots.

The table is the single source for execution, the bubble and diagrams.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spanax.displays import display
from spanax.plan.pipeline.schedules import KINDS, Kind, Orders, Task, orders
from spanax.plan.plan import Schedule

NONE = -1
"""In a table: no task, or no slot."""

COLUMNS = (
    "kind",
    "microbatch",
    "chunk",
    "residual",
    "received",
    "split",
    "seeds",
    "arrives_forward",
    "arrives_backward",
)
"""Columns per stage and tick: the task (`kind` indexes KINDS), its slots, and the slots of arriving values."""


_SHARE = re.compile(r"(\d+)_of_(\d+)_ticks/cond$")


def share_name(num_active: int, num_ticks: int) -> str:
    """Returns the name scope of a conditional task, which records the number of ticks in which it runs."""
    return f"{num_active}_of_{num_ticks}_ticks"


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
        return self._slots["residual"][1]

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
        residuals, forward, backward, split = (
            self._slots[label][0] for label in ("residual", "forward", "backward", "split")
        )
        for tick, row in enumerate(self.tasks):
            for stage, task in enumerate(row):
                if task is None:
                    continue
                part = task.chunk * self.num_stages + stage
                key = task.microbatch, part
                arrived = {"F": forward, "B": backward}.get(task.kind, {})
                values = {
                    "kind": KINDS.index(task.kind),
                    "microbatch": task.microbatch,
                    "chunk": task.chunk,
                    "residual": residuals[key],
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
        when = self._when
        last = self.num_parts - 1
        pairs = [(m, part) for m in range(self.num_microbatches) for part in range(self.num_parts)]

        def spans(name: str) -> Iterable[tuple[tuple[int, int], int, int]]:
            for m, part in pairs:
                forward = when["F", m, part]
                backward = when["B", m, part]
                weights = when.get(("W", m, part), backward)
                if name == "residual":
                    yield (m, part), forward, weights
                elif name == "split" and weights > backward:
                    yield (m, part), backward, weights
                elif name == "forward" and part:
                    yield (m, part), when["F", m, part - 1], forward
                elif name == "backward":
                    yield (m, part), forward if part == last else when["B", m, part + 1], backward

        return {
            name: _slots(spans(name), self.num_stages, is_reused=name in ("forward", "backward"))
            for name in ("residual", "forward", "backward", "split")
        }

    def _repr_html_(self) -> str:
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
    is_paired = schedule in ("1f1b", "interleaved")
    if is_paired:
        device_orders = tuple(
            tuple(each for task in order for each in ((task, task._replace(kind="W")) if task.kind == "B" else (task,)))
            for order in device_orders
        )
    rows = tuple(_in_lockstep(device_orders, num_stages * num_chunks, "W" if is_paired else "B"))
    return Ticks(schedule, num_stages, num_microbatches, num_chunks, rows)


def _in_lockstep(device_orders: Orders, num_parts: int, sends: Kind) -> Iterator[tuple[Task | None, ...]]:
    """Yields the task of each device at each tick: the next in its order once its operands have arrived.

    Args:
      device_orders: the order of every device.
      num_parts: the number of parts of the model.
      sends: the kind of task after which a gradient is sent to the previous part.
    """
    finished = set[tuple[Kind, int, int] | None]([None])
    num_devices = len(device_orders)
    remaining = [list(reversed(order)) for order in device_orders]
    while any(remaining):
        row = tuple(
            tasks.pop() if tasks and _needed(tasks[-1], device, num_devices, num_parts, sends) in finished else None
            for device, tasks in enumerate(remaining)
        )
        finished |= {
            (task.kind, task.microbatch, task.chunk * num_devices + device)
            for device, task in enumerate(row)
            if task is not None
        }
        yield row


def _needed(task: Task, device: int, num_devices: int, num_parts: int, sends: Kind) -> tuple[Kind, int, int] | None:
    """Returns the (kind, microbatch, part) that a task needs from another device; None: nothing."""
    part = task.chunk * num_devices + device
    if task.kind == "F" and part > 0:
        return "F", task.microbatch, part - 1
    return (sends, task.microbatch, part + 1) if task.kind == "B" and part + 1 < num_parts else None


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
