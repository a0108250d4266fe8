"""Cost terms of one layout: matmuls, memory traffic and collectives, as arrays.

A term is a global size and the mesh axes that divide it. One walk over a program's groups of operations yields the
terms of a layout; all meshes on which the layout resolves equally are priced from them, thousands at a time.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np

from spanax.hardware.mesh import MeshShape
from spanax.trace.analysis.op_groups import Phase

ROUND = "round"
HOP = "collective-permute"
"""A value that circulates once around a ring, back to its device; and one hop."""

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", HOP, ROUND)
"""The collectives, in the order of the indices in `Collectives.kind`."""

REPLICATED = ("all-gather", "all-reduce", ROUND)
"""Collectives with a replicated result."""


T = TypeVar("T")


def column(dtype: type, width: int = 0) -> Any:
    """Returns a field of a table: an array with one entry, or one row of `width` entries, per row of the table."""
    return field(metadata={"dtype": dtype, "width": width})


def table(kind: type[T], rows: Sequence[Sequence[Any]], **others: np.ndarray) -> T:
    """Returns a table of rows, which are in the order of its columns; `others` are its other fields."""
    columns = [each for each in fields(kind) if each.metadata]  # type: ignore[arg-type]
    arrays: list[Any] = []
    for index, each in enumerate(columns):
        dtype = each.metadata["dtype"]
        width = each.metadata["width"]
        entries = [row[index] for row in rows]
        array = np.asarray(entries, dtype)
        array = array.reshape(-1, width) if width else array
        arrays.append(tuple(entries) if dtype is str else array)
    return kind(*arrays, **others)


class Matmul(NamedTuple):
    """A row of `Matmuls`, whose columns it has in their order."""

    flops: float
    work: int
    sizes: Sequence[float]
    size_axes: Sequence[int]
    batched: int
    num_bytes: Sequence[float]
    bytes_axes: Sequence[int]
    bytes_batched: Sequence[bool]
    dtypes: str
    runs: int
    phase: int
    in_layers: bool
    scores: Sequence[bool] = (False, False, False)
    fused: bool = False
    ragged: int = -1
    groups: int = 1
    expert_axes: int = 0


@dataclass(frozen=True, eq=False)
class Matmuls:
    """The matmuls and convolutions. Every field is an array with one entry per group of operations.

    `flops / ways(work)` are the FLOPs of one run on one device; `sizes` are the global m, n, k and number of separate
    products, each divided by the axes in `size_axes`. `batched` is the index of the one that grows with the batch, -1
    for none. `num_bytes` and `bytes_axes`: both operands and the result. `scores`: which of these are attention scores;
    `fused`: whether it is part of an attention kernel. `ragged`: the index of the size whose rows are divided into
    `groups`, each with a matrix of its own, of which `flops` and `sizes` count all products; -1 for none.
    `expert_axes`: the mesh axes that shard its experts.
    """

    flops: np.ndarray = column(float)
    work: np.ndarray = column(int)
    sizes: np.ndarray = column(float, 4)
    size_axes: np.ndarray = column(int, 4)
    batched: np.ndarray = column(int)
    num_bytes: np.ndarray = column(float, 3)
    bytes_axes: np.ndarray = column(int, 3)
    bytes_batched: np.ndarray = column(bool, 3)
    dtypes: tuple[str, ...] = column(str)
    runs: np.ndarray = column(float)
    phase: np.ndarray = column(int)
    in_layers: np.ndarray = column(bool)
    scores: np.ndarray = column(bool, 3)
    fused: np.ndarray = column(bool)
    ragged: np.ndarray = column(int)
    groups: np.ndarray = column(float)
    expert_axes: np.ndarray = column(int)

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        """Each row without its phase and number of runs: equal rows take equal time."""
        sizes = (self.flops, self.work, self.sizes, self.size_axes, self.batched, self.expert_axes)
        table = np.column_stack([*sizes, self.num_bytes, self.bytes_axes, self.bytes_batched, self.scores, self.fused])
        return list(zip(self.dtypes, map(tuple, table.tolist()), strict=True))

    def some(self, rows: Sequence[int]) -> "Matmuls":
        """Returns some of the rows."""
        chosen = np.asarray(rows, int)
        return Matmuls(**{field.name: np.asarray(getattr(self, field.name))[chosen] for field in fields(self)})


@dataclass(frozen=True, eq=False)
class MemoryTraffic:
    """The bytes that fused kernels read and write, by phase; `kernels` is the number of kernels."""

    num_bytes: np.ndarray = column(float)
    axes: np.ndarray = column(int)
    batched: np.ndarray = column(bool)
    phase: np.ndarray = column(int)
    in_layers: np.ndarray = column(bool)
    scores: np.ndarray = column(bool)
    kernels: np.ndarray = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class Collectives:
    """The collectives: global bytes of the value, mesh axes of the collective, and other axes that shard the value.

    `of_weights` distinguishes gathers of parameters and reductions of gradients, which can overlap with computation,
    from those of activations, which the next operation waits for.
    """

    kind: np.ndarray = column(int)
    num_bytes: np.ndarray = column(float)
    over: np.ndarray = column(int)
    unchanged: np.ndarray = column(int)
    batched: np.ndarray = column(bool)
    runs: np.ndarray = column(float)
    phase: np.ndarray = column(int)
    in_layers: np.ndarray = column(bool)
    of_weights: np.ndarray = column(bool)


@dataclass(frozen=True, eq=False)
class HostCopies:
    """The copies of values between the memory of the devices and of the host: global bytes over all runs.

    `to_host` are those of the forward pass, which stores what the others copy back. `loop` numbers the loops over
    layers, and `runs` is the number of their layers.
    """

    num_bytes: np.ndarray = column(float)
    axes: np.ndarray = column(int)
    batched: np.ndarray = column(bool)
    to_host: np.ndarray = column(bool)
    loop: np.ndarray = column(int)
    runs: np.ndarray = column(float)


@dataclass(frozen=True, eq=False)
class Terms:
    """All cost terms of a program under one layout.

    `carry_bytes` is the carry between two of the `num_layers` layers for the full batch; both are 0 where the program
    has no loop over layers.
    """

    axes: tuple[str, ...]
    matmuls: Matmuls
    memory_traffic: MemoryTraffic
    collectives: Collectives
    host_copies: HostCopies
    carry_bytes: float
    num_layers: int

    def moved_bytes(
        self, mesh: MeshShape, *, scale: float = 1.0, num_stages: float = 1
    ) -> dict[tuple[str, str], float]:
        """Returns output bytes per device and step by (collective, mesh axes), as `("all-reduce", "data+fsdp")`.

        The output of an all-gather is the gathered value, that of an all-reduce the sum; that of a reduce-scatter or an
        all-to-all is the device's shard.

        Args:
          mesh: sizes of the mesh axes inside a stage.
          scale: the batch over the traced batch.
          num_stages: of a pipeline, which divide the layers and the update; fewer where some of it is padding.
        """
        result = defaultdict[tuple[str, str], float](float)
        moves = self.collectives
        in_stages = moves.in_layers | (moves.phase == Phase.UPDATE)
        runs = moves.runs / np.where(in_stages, num_stages, 1)
        num_bytes = moves.num_bytes * np.where(moves.batched, scale, 1.0) * runs
        for row, kind in enumerate(moves.kind):
            over, common = (
                [axis for bit, axis in enumerate(self.axes) if mask >> bit & 1 and mesh.ways([axis]) > 1]
                for mask in (int(moves.over[row]), int(moves.unchanged[row]))
            )
            shards = common if KINDS[kind] in REPLICATED else [*common, *over]
            if over:
                name = HOP if KINDS[kind] == ROUND else KINDS[kind]
                result[name, "+".join(over)] += float(num_bytes[row] / mesh.ways(shards))
        return dict(result)
