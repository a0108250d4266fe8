"""Simulates the start and end of each task of a pipeline: the reference of the closed forms and of the ticks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from spanax.errors import SpanaxError
from spanax.plan.pipeline.schedules import KINDS, Kind, Order, Orders, Task


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each part of the model on one microbatch, from the first part to the last.

    A part is a chunk of a device or, with one chunk per device, a stage. `backward_seconds` is the gradient of the
    input, `weight_seconds` that of the weights; a schedule without separate tasks runs both together.

    Raises:
      SpanaxError: lengths differ, or a time is negative or not finite.

    Example:
      >>> StageSeconds(forward_seconds=(1, 2), backward_seconds=(1, 2), weight_seconds=(1, 2)).num_parts
      2
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        times = {
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            "weight_seconds": self.weight_seconds,
        }
        lengths = {name: len(values) for name, values in times.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise SpanaxError("every part of the model needs its three times.", where=counts)
        for name, values in times.items():
            _check_times(name, values)

    @staticmethod
    def equal(
        num_parts: int, forward_seconds: float = 1.0, backward_seconds: float = 1.0, weight_seconds: float = 1.0
    ) -> "StageSeconds":
        """Returns the same three times for each of `num_parts` parts.

        Example:
          >>> StageSeconds.equal(2, 1.0, 2.0, 1.0).backward_seconds
          (2.0, 2.0)
        """
        return StageSeconds(*((t,) * num_parts for t in (forward_seconds, backward_seconds, weight_seconds)))

    @property
    def num_parts(self) -> int:
        """The number of parts of the model: stages times chunks."""
        return len(self.forward_seconds)


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task, in seconds from the start of the step, in the structure of `orders`.

    `peak_in_flight` is the peak number of chunks per device whose activations are live: from `F` to `W`, or to `B`
    where the order has no `W`. Fewer activations are live between `B` and `W`, so that it is an upper bound for
    `zero-bubble`.

    Example:
      >>> from spanax.plan.pipeline.schedules import orders
      >>> timeline = simulate(orders("1f1b", num_stages=4, num_microbatches=8), StageSeconds.equal(4))
      >>> timeline.seconds, timeline.bubble_over_ideal, timeline.peak_in_flight
      (33.0, 0.375, (4, 3, 2, 1))
    """

    orders: Orders
    start_seconds: tuple[tuple[float, ...], ...]
    end_seconds: tuple[tuple[float, ...], ...]
    busy_seconds: tuple[float, ...]
    peak_in_flight: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first task to the end of the last."""
        return max((ends[-1] for ends in self.end_seconds if ends), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The idle fraction of all device-seconds; 0 for a step of zero seconds."""
        device_seconds = self.seconds * len(self.busy_seconds)
        return 1 - math.fsum(self.busy_seconds) / device_seconds if device_seconds else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle over busy device-seconds: the slowdown of the step by the bubble."""
        busy = math.fsum(self.busy_seconds)
        return self.seconds * len(self.busy_seconds) / busy - 1 if busy else 0.0


def simulate(orders: Orders, stage_seconds: StageSeconds, hop_seconds: float | Sequence[float] = 0.0) -> Timeline:
    """Returns the timeline of a pipeline: each device runs its tasks in order, each as soon as its operands arrive.

    `F` depends on `F` of the previous part, `B` on `B` of the next part (in the last part, on its `F`), `W` on its `B`.
    Values from another device arrive a hop later. Hops overlap with compute and with each other.

    Args:
      orders: what `spanax.plan.pipeline.schedules.orders` returned, or custom orders.
      stage_seconds: the times of `len(orders)` x chunks parts.
      hop_seconds: seconds to send activations, or their gradients, to the next part; a scalar, or one value for each
        boundary between two parts.

    Raises:
      SpanaxError: the times do not match the orders, a task is repeated, or the orders deadlock.

    Example:
      >>> from spanax.plan.pipeline.schedules import orders
      >>> simulate(orders("gpipe", 2, 2), StageSeconds.equal(2), hop_seconds=0.5).start_seconds
      ((0.0, 1.0, 6.0, 8.0), (1.5, 2.5, 3.5, 5.5))
    """
    _check_tasks(orders)
    hops = _hops(orders, stage_seconds, hop_seconds)
    steps = [_steps(device, orders, stage_seconds, hops) for device in range(len(orders))]
    ends: dict[int, float] = {}
    done = [0] * len(orders)
    free_seconds = [0.0] * len(orders)
    starts: list[list[float]] = [[] for _ in orders]
    waiting: dict[int, int] = {}
    ready = list(range(len(orders)))
    while ready:
        device = ready.pop()
        device_steps, now = steps[device], free_seconds[device]
        for index in range(done[device], len(device_steps)):
            task, needed, delay, duration = device_steps[index]
            if needed is not None:
                if needed not in ends:
                    waiting[needed] = device
                    break
                now = max(now, ends[needed] + delay)
            starts[device].append(now)
            now += duration
            ends[task] = now
            if task in waiting:
                ready.append(waiting.pop(task))
        free_seconds[device], done[device] = now, len(starts[device])
    if any(count < len(order) for count, order in zip(done, orders, strict=True)):
        raise _blocked(orders, done)
    return Timeline(
        orders=orders,
        start_seconds=tuple(map(tuple, starts)),
        end_seconds=tuple(tuple(ends[task] for task, *_ in device_steps) for device_steps in steps),
        busy_seconds=tuple(math.fsum(duration for *_, duration in device_steps) for device_steps in steps),
        peak_in_flight=tuple(map(peak_in_flight, orders)),
    )


def peak_in_flight(order: Order) -> int:
    """Returns the peak number of chunks with live activations on a device: from `F` to `W`, or to `B` without `W`.

    Example:
      >>> peak_in_flight((Task("F", 0), Task("F", 1), Task("B", 0), Task("B", 1)))
      2
    """
    split = _split(order)
    in_flight = peak = 0
    for task in order:
        if task.kind == "F":
            in_flight += 1
            peak = max(peak, in_flight)
        elif task.kind == "W" or (task.microbatch, task.chunk) not in split:
            in_flight -= 1
    return peak


def _split(order: Order) -> set[tuple[int, int]]:
    """Returns the (microbatch, chunk) pairs whose weight gradient is a separate task."""
    return {(task.microbatch, task.chunk) for task in order if task.kind == "W"}


def _check_times(name: str, values: Iterable[float]) -> None:
    for part, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise SpanaxError(f"{name}[{part}] is {value}; it must be finite and >= 0.")


def _check_tasks(orders: Orders) -> None:
    """Raises for orders without a device, invalid tasks and repeated tasks."""
    if not orders:
        raise SpanaxError("the orders are empty.", fix="one order per stage")
    for device, order in enumerate(orders):
        if len(set(order)) < len(order):
            repeated = next(task for i, task in enumerate(order) if task in order[:i])
            raise SpanaxError(f"device {device} has {repeated} twice.", fix="each task once")
        for task in order:
            if task.kind not in KINDS or task.microbatch < 0 or task.chunk < 0:
                raise SpanaxError(
                    f"device {device} has {task}, which is not a task.",
                    fix=f"a kind of {', '.join(KINDS)}, a microbatch >= 0 and a chunk >= 0",
                )


def _hops(orders: Orders, stage_seconds: StageSeconds, hop_seconds: float | Sequence[float]) -> list[float]:
    """Returns the seconds from each part to the next; checks that times, hops and orders match."""
    num_parts = stage_seconds.num_parts
    chunks = 1 + max((task.chunk for order in orders for task in order), default=0)
    if num_parts != len(orders) * chunks:
        raise SpanaxError(
            f"there are times for {num_parts} parts, and the orders have {len(orders) * chunks}.",
            where=f"{len(orders)} devices x {chunks} chunks",
        )
    seconds = np.asarray(hop_seconds, float)
    if seconds.ndim and seconds.shape != (num_parts - 1,):
        raise SpanaxError(
            f"there are {seconds.size} hop times for the {num_parts - 1} boundaries of {num_parts} parts.",
            fix="one number, or one per boundary",
        )
    hops = np.broadcast_to(seconds, (num_parts - 1,)).tolist()
    _check_times("hop_seconds", hops)
    return hops if len(orders) > 1 else [0.0] * len(hops)


def _key(kind: Kind, microbatch: int, part: int, num_parts: int) -> int:
    """Returns an integer key of a task; tuples would make the simulation twice as slow."""
    return (microbatch * num_parts + part) * len(KINDS) + KINDS.index(kind)


def _needed(task: Task, part: int, num_parts: int) -> tuple[Kind, int] | None:
    """Returns the kind and part of the task that this task depends on, on the same microbatch."""
    if task.kind == "F":
        return ("F", part - 1) if part else None
    if task.kind == "B":
        return ("B", part + 1) if part + 1 < num_parts else ("F", part)
    return ("B", part)


def _steps(
    device: int, orders: Orders, stage_seconds: StageSeconds, hops: list[float]
) -> list[tuple[int, int | None, float, float]]:
    """Returns for each task of a device: its key, the key of its dependency, the seconds of the hop, its seconds."""
    num_parts = stage_seconds.num_parts
    split = _split(orders[device])
    steps: list[tuple[int, int | None, float, float]] = []
    for task in orders[device]:
        kind, microbatch, chunk = task
        part = chunk * len(orders) + device
        if kind == "F":
            duration = stage_seconds.forward_seconds[part]
        elif kind == "W":
            duration = stage_seconds.weight_seconds[part]
        else:
            duration = stage_seconds.backward_seconds[part]
            if (microbatch, chunk) not in split:
                duration += stage_seconds.weight_seconds[part]
        needed = _needed(task, part, num_parts)
        key = None if needed is None else _key(needed[0], microbatch, needed[1], num_parts)
        delay = 0.0 if needed is None or needed[1] == part else hops[min(part, needed[1])]
        steps.append((_key(kind, microbatch, part, num_parts), key, delay, duration))
    return steps


def _blocked(orders: Orders, done: Sequence[int]) -> SpanaxError:
    """Returns the error that lists the tasks of a deadlock and their dependencies."""
    num_parts = len(orders) * (1 + max(task.chunk for order in orders for task in order))
    dependencies = []
    stuck = [device for device, order in enumerate(orders) if done[device] < len(order)]
    for device in stuck[:3]:
        task = orders[device][done[device]]
        needed = _needed(task, task.chunk * len(orders) + device, num_parts)
        assert needed is not None, "a first part waits for nothing"
        chunk, device_index = divmod(needed[1], len(orders))
        dependency = Task(needed[0], task.microbatch, chunk)
        missing = "" if dependency in orders[device_index] else ", which has no such task"
        dependencies.append(f"device {device} at {task} waits for {dependency} of device {device_index}{missing}")
    more = f"; and {len(stuck) - 3} more" if len(stuck) > 3 else ""
    return SpanaxError(
        f"the orders block each other: {len(stuck)} of {len(orders)} devices wait forever.",
        where="; ".join(dependencies) + more,
        fix="put each awaited task before the one that waits for it",
    )
