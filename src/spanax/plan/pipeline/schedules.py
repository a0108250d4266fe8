"""Pipeline schedules: the order of forward, backward and weight-gradient tasks on each device."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from spanax.errors import PipelineError, UnknownNameError, nearest

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
"""Forward, gradient of the input, gradient of the weights."""


class Task(NamedTuple):
    """One task of one device: a chunk of its layers on one microbatch.

    `F` is the forward pass. `B` is the gradient of the input and, where the order has no `W` for it, of the weights.
    `W` is the gradient of the weights alone, which no other stage depends on. A tuple instead of a dataclass, since a
    schedule of 64 stages and 512 microbatches has 98,304 tasks.

    Example:
      >>> str(Task("B", microbatch=3, chunk=1))
      'B of microbatch 3, chunk 1'
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch}, chunk {self.chunk}"


Order = tuple[Task, ...]
"""The tasks of one device, first to last."""

Orders = tuple[Order, ...]
"""The order of every device, device 0 first: a pipeline runs it, and `simulate` times it."""


def orders(schedule: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Orders:
    """Returns the order of tasks on every device of a pipeline, from the first stage to the last.

    Args:
      schedule: `gpipe`, `1f1b`, `interleaved` or `zero-bubble` (ZB-H1).
      num_stages: devices (or groups of them) along the `pipe` axis.
      num_microbatches: the number of microbatches of a step.
      num_chunks: parts of the model on each device, for `interleaved`. Chunk `c` of device `d` is part
        `c * num_stages + d` of the model.

    Raises:
      SpanaxError: an unknown schedule, a count below 1, or a count that the schedule does not support.

    Example:
      >>> for order in orders("1f1b", num_stages=2, num_microbatches=3):
      ...     print(" ".join(f"{task.kind}{task.microbatch}" for task in order))
      F0 F1 B0 F2 B1 B2
      F0 B0 F1 B1 F2 B2
    """
    check_counts(schedule, num_stages, num_microbatches, num_chunks)
    order = SCHEDULES[schedule]
    return tuple(order(device, num_stages, num_microbatches, num_chunks) for device in range(num_stages))


def gpipe(device: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Returns all forwards, then all backwards, last microbatch first: the derivative of a pipelined forward.

    Source: Huang et al., GPipe, arXiv 1811.06965, figure 2c.

    Example:
      >>> " ".join(f"{task.kind}{task.microbatch}" for task in gpipe(0, num_stages=2, num_microbatches=3))
      'F0 F1 F2 B2 B1 B0'
    """
    forward = (Task("F", i) for i in range(num_microbatches))
    backward = (Task("B", i) for i in reversed(range(num_microbatches)))
    return (*forward, *backward)


def one_forward_one_backward(device: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Returns one forward per later stage, then alternating forwards and backwards, which bounds live activations.

    Source: Narayanan et al., PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, section 2.2.1.

    Example:
      >>> " ".join(f"{task.kind}{task.microbatch}" for task in one_forward_one_backward(1, 2, 3))
      'F0 B0 F1 B1 F2 B2'
    """
    warm_up = num_stages - 1 - device
    return _in_turn(
        warm_up, [Task("F", i) for i in range(num_microbatches)], [Task("B", i) for i in range(num_microbatches)]
    )


def interleaved(device: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Returns 1F1B over `num_chunks` parts of the model per device, in groups of `num_stages` microbatches.

    Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2.2; the number of forwards before the first
    backward is that of Megatron-LM's `forward_backward_pipelining_with_interleaving`.

    Example:
      >>> " ".join(f"{task.kind}{task.microbatch}.{task.chunk}" for task in interleaved(1, 2, 2, 2))
      'F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0'
    """
    warm_up = 2 * (num_stages - 1 - device) + (num_chunks - 1) * num_stages
    groups = range(0, num_microbatches, num_stages)
    chunk_microbatches = [
        (c, i) for first in groups for c in range(num_chunks) for i in range(first, first + num_stages)
    ]
    return _in_turn(
        warm_up,
        [Task("F", i, c) for c, i in chunk_microbatches],
        [Task("B", i, num_chunks - 1 - c) for c, i in chunk_microbatches],
    )


def zero_bubble(device: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Returns ZB-H1: 1F1B with separate weight gradients, delayed by `d` microbatches on device `d`.

    No stage depends on weight gradients, so the last devices compute theirs while the first devices finish.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1 and figure 3.

    Example:
      >>> " ".join(f"{task.kind}{task.microbatch}" for task in zero_bubble(1, 2, 3))
      'F0 B0 F1 B1 W0 F2 B2 W1 W2'
    """
    order: list[Task] = []
    for task in one_forward_one_backward(device, num_stages, num_microbatches):
        order.append(task)
        if task.kind == "B" and task.microbatch >= device:
            order.append(Task("W", task.microbatch - device))
    late = range(max(0, num_microbatches - device), num_microbatches)
    return (*order, *(Task("W", i) for i in late))


SCHEDULES: dict[str, Callable[[int, int, int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""Every schedule by name: (device, stages, microbatches, chunks) -> order of the device."""


def check_known(schedule: str) -> None:
    """Raises SpanaxError if there is no schedule of this name."""
    if schedule not in SCHEDULES:
        raise UnknownNameError(f"unknown schedule '{schedule}'.", fix=nearest(schedule, SCHEDULES))


def check_counts(schedule: str, num_stages: Any, num_microbatches: Any, num_chunks: Any = 1) -> None:
    """Checks that a schedule supports counts, which may be arrays; the error names the first invalid count.

    Raises:
      SpanaxError: an unknown schedule, a count that is not an integer >= 1, chunks that the schedule does not
        support, or microbatches that are not a multiple of the stages where required.

    Example:
      >>> check_counts("interleaved", num_stages=4, num_microbatches=[4, 8], num_chunks=2)
    """
    check_known(schedule)
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for name, count in counts.items():
        array = np.asarray(count)
        is_integer = np.issubdtype(array.dtype, np.integer)
        if not is_integer or (array < 1).any():
            bad = array[array < 1].flat[0] if is_integer else count
            raise PipelineError(f"{name} is {bad}; it must be an integer >= 1.", where=f"schedule '{schedule}'")
    stages, microbatches, chunks = (a.ravel() for a in np.broadcast_arrays(*counts.values()))
    bad_chunks = chunks < 2 if schedule == "interleaved" else chunks > 1
    if bad_chunks.any():
        first = int(bad_chunks.argmax())
        needs = "2 or more chunks" if schedule == "interleaved" else "1 chunk"
        raise PipelineError(
            f"schedule '{schedule}' needs {needs} of layers per stage (num_chunks), and {chunks[first]} are requested.",
            fix="2 chunks, or schedule '1f1b'" if schedule == "interleaved" else "schedule 'interleaved'",
        )
    uneven = microbatches % stages != 0
    if schedule == "interleaved" and uneven.any():
        first = int(uneven.argmax())
        size = int(microbatches[first])
        num_groups = int(stages[first])
        lower = size // num_groups * num_groups
        upper = -(-size // num_groups) * num_groups
        raise PipelineError(
            f"{size} microbatches are not a multiple of {num_groups} stages: "
            f"{size} % {num_groups} = {size % num_groups}.",
            where="schedule 'interleaved' sends them through each chunk in groups of one per stage",
            fix=f"{lower} or {upper} microbatches, or schedule '1f1b'" if lower else f"{upper} microbatches",
        )


def _in_turn(warm_up: int, forward: list[Task], backward: list[Task]) -> Order:
    """Returns `warm_up` forwards, then alternating forwards and backwards, then the remaining backwards."""
    warm_up = min(warm_up, len(forward))
    pairs = zip(forward[warm_up:], backward, strict=False)
    steady = [task for pair in pairs for task in pair]
    return (*forward[:warm_up], *steady, *backward[len(forward) - warm_up :])
