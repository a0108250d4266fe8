"""The main memory that a TPU's compiler takes for tuples of buffers and for scalars."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spanax.plan.cost.memory.state import State
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.analysis.liveness import Liveness
from spanax.trace.jaxpr.graph import Body, Op

SLOT_BYTES = 16 << 10
"""Main memory of a tuple of buffers: the result of a kernel with several outputs, of an asynchronous copy or of a
collective; it is not reused. A scalar that a kernel or a collective writes takes as much while it is live. Source: the
offsets in the buffer assignments of libtpu 0.0.52."""

COPIES = 2
"""Asynchronous copies per array of the state with more than one element: to the chip and back. Source: the programs
compiled by libtpu 0.0.52 for v5e:2x4 in tests/data/memory_cells.json."""


class Counts(NamedTuple):
    """What a program has tables for, in addition to its state.

    Attributes:
      kernels: the values other than scalars that kernels write.
      scalars: the largest number of scalars that are live at once.
      collectives: the collectives of values that grow with the batch.
    """

    kernels: int = 0
    scalars: int = 0
    collectives: int = 0

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        return Counts(*map(sum, zip(self, other, strict=True)))


PER_PROGRAM, PER_KERNEL, PER_COLLECTIVE = 14, 0.14, 1.4
"""Tuples per program (its batch and its metrics), per kernel and per collective: some kernels have several outputs,
some collectives are asynchronous. Source: fitted to half of the programs below 0.25 GiB in
tests/data/memory_cells.json."""


def counted(sharded: ShardedProgram, live: Liveness, body: Body, ops: Sequence[Op]) -> Counts:
    """Returns the counts of one body, without the bodies in it."""
    is_scalar = np.asarray([not sharded.traced.graph.shape(value) for value in live.values], bool)[live.group]
    num_inputs = 0 if body is sharded.traced.graph.body else len(body.inputs)
    starts = np.bincount(live.first[is_scalar], minlength=len(ops) + 2)
    ends = np.bincount(live.last[is_scalar] + 1, minlength=len(ops) + 2)
    scalars = int((starts - ends).cumsum().max(initial=0))
    kernels = max(0, int((~is_scalar).sum()) - num_inputs)
    partitions = [sharded.division(op).partition for op in ops if not op.bodies and op not in sharded.traced.inert]
    shifts = [shift for partition in partitions if partition is not None for shift in partition.shifts]
    return Counts(kernels, scalars, sum(sharded.is_batched(shift.value) for shift in shifts))


def table_bytes(state: State, counts: Counts, free_share: np.ndarray) -> np.ndarray:
    """Returns the main memory of all tuples and scalars of a program on every mesh.

    A parameter is updated on the chip, by a kernel with several outputs, if there is room for it; otherwise in main
    memory, without copies.

    Args:
      state: the sharded leaves.
      counts: those of the program.
      free_share: the share of the memory on the chip that live values leave free.
    """
    copied = (COPIES * state.num_arrays + state.num_updated) * free_share
    tuples = PER_PROGRAM + PER_KERNEL * counts.kernels + PER_COLLECTIVE * counts.collectives
    return SLOT_BYTES * (copied + tuples + counts.scalars)
