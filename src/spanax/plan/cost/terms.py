"""Cost terms of one layout: matmuls, memory traffic and collectives, as arrays.

A term is a global size and the mesh axes that divide it. One walk over a program's groups of operations yields the
terms of a layout; every mesh on which the layout resolves alike is priced from them, thousands at a time.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from spanax.hardware.mesh import MeshShape
from spanax.plan.cost.ring_attention import HOP, ROUND
from spanax.trace.analysis.op_groups import Phase

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", HOP, ROUND)
"""The collectives, in the order in which `Collectives.kind` counts them."""

AS_WHOLE = ("all-gather", "all-reduce", ROUND)
"""Those of which a device receives as much as the whole of what goes over them."""


@dataclass(frozen=True, eq=False)
class Matmuls:
    """The matmuls and convolutions. Every field is an array with one entry a kind of operation.

    `flops` of one run on one device would be `flops / ways(work)`; `sizes` are the global m, n, k and number of
    separate products, each divided by the axes in `splits`. `batched` says which of the four grows with the batch,
    -1 for none. `num_bytes` and `bytes_splits`: both operands and the result. `scores`: which of these are attention
    scores; `fused`: whether it is part of an attention kernel.
    """

    flops: np.ndarray
    work: np.ndarray
    sizes: np.ndarray
    splits: np.ndarray
    batched: np.ndarray
    num_bytes: np.ndarray
    bytes_splits: np.ndarray
    bytes_batched: np.ndarray
    dtypes: tuple[str, ...]
    runs: np.ndarray
    phase: np.ndarray
    in_layers: np.ndarray
    scores: np.ndarray
    fused: np.ndarray

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        """All of each row but when and how often it runs: equal ones take equally long."""
        sizes = (self.flops, self.work, self.sizes, self.splits, self.batched)
        table = np.column_stack(
            [*sizes, self.num_bytes, self.bytes_splits, self.bytes_batched, self.scores, self.fused]
        )
        return list(zip(self.dtypes, map(tuple, table.tolist()), strict=True))

    def some(self, rows: Sequence[int]) -> "Matmuls":
        """Some of the rows."""
        chosen = np.asarray(rows, int)
        return Matmuls(**{one.name: np.asarray(getattr(self, one.name))[chosen] for one in fields(self)})


@dataclass(frozen=True, eq=False)
class MemoryTraffic:
    """The bytes that fused kernels read and write, by phase; `kernels` are how many they are in all."""

    num_bytes: np.ndarray
    split: np.ndarray
    batched: np.ndarray
    phase: np.ndarray
    in_layers: np.ndarray
    scores: np.ndarray
    kernels: np.ndarray


@dataclass(frozen=True, eq=False)
class Collectives:
    """The collectives: global bytes of the value, the axes it goes over, and those that split it besides.

    `of_weights` tells gathers of parameters and reductions of gradients, which can run beside the computation,
    from those of activations, which the next operation waits for.
    """

    kind: np.ndarray
    num_bytes: np.ndarray
    over: np.ndarray
    kept: np.ndarray
    batched: np.ndarray
    runs: np.ndarray
    phase: np.ndarray
    in_layers: np.ndarray
    of_weights: np.ndarray


@dataclass(frozen=True, eq=False)
class Terms:
    """Everything that one layout makes a program do.

    `carry_bytes` is what goes from one of the `num_layers` layers to the next for the whole batch; both are 0 where the
    program has no loop over layers.
    """

    axes: tuple[str, ...]
    matmuls: Matmuls
    memory_traffic: MemoryTraffic
    collectives: Collectives
    carry_bytes: float
    num_layers: int

    def moved_bytes(
        self, mesh: MeshShape, *, scale: float = 1.0, num_microbatches: int = 1, num_stages: float = 1
    ) -> dict[tuple[str, str], float]:
        """Output bytes a device and step by (kind of collective, mesh axes), as `("all-reduce", "data+fsdp")`.

        The output of an all-gather is all that is gathered, that of an all-reduce the sum; that of a reduce-scatter
        or an all-to-all is the device's own part.

        Args:
          mesh: sizes of the mesh axes inside a stage.
          scale: the batch of one microbatch over the traced batch.
          num_microbatches: what is done for each; gradients are summed and weights updated once.
          num_stages: of a pipeline, each of which has its part of the layers and of the update; fewer where some of it
            is padding.
        """
        found, moves = defaultdict[tuple[str, str], float](float), self.collectives
        is_update = moves.phase == Phase.UPDATE
        is_once = is_update | (moves.of_weights & (moves.kind == KINDS.index("all-reduce")))
        in_stages = moves.in_layers | is_update
        runs = moves.runs * np.where(is_once, 1, num_microbatches) / np.where(in_stages, num_stages, 1)
        num_bytes = moves.num_bytes * np.where(moves.batched, scale, 1.0) * runs
        for row, at in enumerate(moves.kind):
            over, kept = (
                [axis for bit, axis in enumerate(self.axes) if mask >> bit & 1 and mesh.ways([axis]) > 1]
                for mask in (int(moves.over[row]), int(moves.kept[row]))
            )
            split = kept if KINDS[at] in AS_WHOLE else [*kept, *over]
            if over:
                name = HOP if KINDS[at] == ROUND else KINDS[at]
                found[name, "+".join(over)] += float(num_bytes[row] / mesh.ways(split))
        return dict(found)
