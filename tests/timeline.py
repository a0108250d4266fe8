"""Simulates the tasks of a pipeline: the reference of the closed forms."""

import math
from dataclasses import dataclass

from spanax.plan.pipeline.schedules import Order, Orders, Task


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each part of the model on one microbatch; a part is a chunk of the layers of a device."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...]

    @staticmethod
    def equal(
        num_parts: int, forward_seconds: float = 1.0, backward_seconds: float = 1.0, weight_seconds: float = 1.0
    ) -> "StageSeconds":
        """Returns the same three times for each part."""
        return StageSeconds(*((t,) * num_parts for t in (forward_seconds, backward_seconds, weight_seconds)))

    def of(self, task: Task, part: int, order: Order) -> float:
        """Returns the seconds of a task; a `B` without a `W` includes the gradient of the weights."""
        if task.kind == "F":
            return self.forward_seconds[part]
        if task.kind == "W":
            return self.weight_seconds[part]
        is_split = task._replace(kind="W") in order
        return self.backward_seconds[part] + (0.0 if is_split else self.weight_seconds[part])


@dataclass(frozen=True)
class Timeline:
    """The seconds of a step, those in which each device is busy, and its peak number of live chunks."""

    seconds: float
    busy_seconds: tuple[float, ...]
    peak_in_flight: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """The idle fraction of all device-seconds."""
        return 1 - math.fsum(self.busy_seconds) / (self.seconds * len(self.busy_seconds))

    @property
    def bubble_over_ideal(self) -> float:
        """Idle over busy device-seconds."""
        return self.seconds * len(self.busy_seconds) / math.fsum(self.busy_seconds) - 1


def simulate(orders: Orders, times: StageSeconds, hop_seconds: float = 0.0) -> Timeline:
    """Returns the timeline where each device runs its tasks in order, each as soon as its operands arrive."""
    ends: dict[tuple[int, Task], float] = {}
    now = [0.0] * len(orders)
    busy = [0.0] * len(orders)
    left = [list(order) for order in orders]
    while any(left):
        before = len(ends)
        for device, tasks in enumerate(left):
            while tasks:
                part = tasks[0].chunk * len(orders) + device
                needed = needs(tasks[0], part, len(orders), len(times.forward_seconds))
                if needed is not None and needed not in ends:
                    break
                task = tasks.pop(0)
                if needed is not None:
                    hop = hop_seconds if needed[0] != device else 0.0
                    now[device] = max(now[device], ends[needed] + hop)
                seconds = times.of(task, part, orders[device])
                now[device] += seconds
                busy[device] += seconds
                ends[device, task] = now[device]
        assert len(ends) > before, "the orders block each other"
    return Timeline(max(now), tuple(busy), tuple(map(peak_in_flight, orders)))


def needs(task: Task, part: int, num_devices: int, num_parts: int) -> tuple[int, Task] | None:
    """Returns the device and the task that a task waits for."""
    if task.kind == "W":
        return part % num_devices, task._replace(kind="B")
    if task.kind == "B" and part == num_parts - 1:
        return part % num_devices, task._replace(kind="F")
    other = part + (1 if task.kind == "B" else -1)
    return None if other < 0 else (other % num_devices, task._replace(chunk=other // num_devices))


def peak_in_flight(order: Order) -> int:
    """Returns the peak number of chunks with live activations: from `F` to `W`, or to `B` without `W`."""
    is_split = any(task.kind == "W" for task in order)
    in_flight = peak = 0
    for task in order:
        in_flight += {"F": 1, "B": 0 if is_split else -1, "W": -1}[task.kind]
        peak = max(peak, in_flight)
    return peak
