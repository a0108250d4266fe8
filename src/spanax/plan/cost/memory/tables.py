"""The main memory that a TPU's compiler takes for tuples of buffers and for scalars."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spanax.plan.cost.memory.state import State
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.tiled_scatter import PartialSum, is_vector_product, is_windowed
from spanax.trace.analysis.liveness import Liveness
from spanax.trace.jaxpr.graph import Body, Op

SLOT_BYTES = 16 << 10
"""Main memory of a tuple of buffers: the result of a kernel with several outputs, of an asynchronous copy or of a
collective; it is not reused. A scalar that a kernel or a collective writes takes as much while it is live. Source: the
offsets in the buffer assignments of libtpu 0.0.52."""

COPIES = 2
"""Asynchronous copies per array of the state with more than one element: to the chip and back. Source: the programs
compiled by libtpu 0.0.52 for v5e:2x4 in tests/data/memory_cells.json."""


WINDOW = 8
WINDOW_OF_TWO = 3
"""Tuples of a windowed einsum (collective matmul): four permutes of a loop, its kernels, and the permute of the result;
the loop over two devices has one permute. Source: 11 and 14 loops in such assignments."""


class Counts(NamedTuple):
    """What a program has tables for, in addition to its state.

    Attributes:
      kernels: the values other than scalars that kernels write.
      scalars: the largest number of scalars that are live at once.
      collectives: the collectives of values that grow with the batch.
      sums: the sums of matmuls that are stored sharded.
    """

    kernels: int = 0
    scalars: int = 0
    collectives: int = 0
    sums: tuple[PartialSum, ...] = ()

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        return Counts(
            self.kernels + other.kernels,
            self.scalars + other.scalars,
            self.collectives + other.collectives,
            self.sums + other.sums,
        )


PER_PROGRAM = 14
PER_KERNEL = 0.14
PER_COLLECTIVE = 1.4
"""Tuples per program (its batch and its metrics), per kernel and per collective: some kernels have several outputs,
some collectives are asynchronous. Source: fitted to half of the programs below 0.25 GiB in
tests/data/memory_cells.json."""


UPPER_FACTOR = 1.25
UPPER_PER_PROGRAM = 8
UPPER_PER_COLLECTIVE = 8
"""The largest factor of compiled tuples over their estimate, and the further tuples of a program and a collective."""


def counted(sharded: ShardedProgram, live: Liveness, body: Body, ops: Sequence[Op]) -> Counts:
    """Returns the counts of one body, without the bodies in it."""
    is_scalar = np.asarray([not sharded.traced.graph.shape(value) for value in live.values], bool)[live.group]
    num_inputs = 0 if body is sharded.traced.graph.body else len(body.inputs)
    starts = np.bincount(live.first[is_scalar], minlength=len(ops) + 2)
    ends = np.bincount(live.last[is_scalar] + 1, minlength=len(ops) + 2)
    scalars = int((starts - ends).cumsum().max(initial=0))
    kernels = max(0, int((~is_scalar).sum()) - num_inputs)
    partitions = [
        (op, sharded.division(op).partition) for op in ops if not op.bodies and op not in sharded.traced.inert
    ]
    shifts = [(op, shift) for op, partition in partitions if partition is not None for shift in partition.shifts]
    scattered = [each for each in shifts if each[0].name == "dot_general" and each[1].kind == "reduce-scatter"]
    graph = sharded.traced.graph
    sums = tuple(
        PartialSum.of(graph, op, shift.over, shift.unchanged)
        for op, shift in scattered
        if not is_vector_product(graph, op)
    )
    return Counts(kernels, scalars, sum(sharded.is_batched(shift.value) for _, shift in shifts), sums)


def num_window_tuples(sums: Sequence[PartialSum], num_shards: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns the tuples of the reduce-scatters that XLA lowers to windowed einsums, on every mesh.

    Args:
      sums: those of the program.
      num_shards: the number of shards of every set of mesh axes.
      scale: the batch of one microbatch over the traced batch.
    """
    total = np.zeros(scale.shape)
    for partial in sums:
        over = num_shards[partial.over]
        unchanged = num_shards[partial.unchanged]
        others = num_shards[-1] / (over * unchanged)
        is_window = is_windowed(partial, over, unchanged, others, scale) & (over > 1)
        total += np.where(is_window, np.where(over > 2, WINDOW, WINDOW_OF_TWO), 0)
    return total


def table_bytes(
    state: State, counts: Counts, free_share: np.ndarray, num_window_tuples: np.ndarray, *, is_upper: bool = False
) -> np.ndarray:
    """Returns the main memory of all tuples and scalars of a program on every mesh.

    A parameter is updated on the chip, by a kernel with several outputs, if there is room for it; otherwise in main
    memory, without copies.

    Args:
      state: the sharded leaves.
      counts: those of the program.
      free_share: the share of the memory on the chip that live values leave free.
      num_window_tuples: the tuples of windowed einsums.
      is_upper: whether to return an upper estimate.
    """
    copied = (COPIES * state.num_arrays + state.num_updated) * free_share
    tuples = PER_PROGRAM + PER_KERNEL * counts.kernels + PER_COLLECTIVE * counts.collectives
    total = copied + tuples + counts.scalars + num_window_tuples
    if is_upper:
        total = UPPER_FACTOR * total + UPPER_PER_PROGRAM + UPPER_PER_COLLECTIVE * counts.collectives
    return SLOT_BYTES * total
