"""The state and the batch on one device: bytes by kind of leaf, and what tiles add to them."""

import math
from collections import defaultdict
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

import numpy as np

from spanax.plan.cost.memory.tiles import Array, Tiled
from spanax.plan.sharding.partition import Masks, as_masks, union
from spanax.plan.sharding.placement import is_offloaded
from spanax.plan.sharding.resolve import Resolver
from spanax.plan.spmd.tiled_scatter import WORD_BYTES
from spanax.trace.analysis.labels import Labels
from spanax.trace.variables import Leaf

OFFLOADED = "offloaded"
"""The kind of leaves in host memory."""

STATE_GROUPS = {"param": "parameters", "optimizer": "optimizer", "other": "other state", "batch": "batch"}
"""The memory group of each kind of leaf."""


@dataclass(frozen=True, eq=False)
class State:
    """Leaves of the state and the batch: kind, global bytes, the axes that shard them, whether stacked by layer.

    Equal, equally sharded leaves are merged and counted. Each parameter that the step updates also has its gradient,
    sharded as it is when accumulated.
    """

    kind: tuple[str, ...]
    num_bytes: Array
    axes: Array
    stacked: Array
    tiled: tuple[Tiled, ...]
    counts: Array

    @property
    def num_arrays(self) -> int:
        """The number of leaves of the state that have more than one element."""
        return self._count({"param", "optimizer", "other"})

    @property
    def num_updated(self) -> int:
        """The number of parameters that have more than one element."""
        return self._count({"gradient"})

    def _count(self, kinds: Collection[str]) -> int:
        rows = zip(self.kind, self.tiled, self.counts, strict=True)
        return int(sum(count for kind, tiled, count in rows if kind in kinds and math.prod(tiled.shape) > 1))

    def local_bytes(self, kind: str, num_shards: Array, num_stages: Array, *, outside: bool = False) -> Array:
        """Returns the bytes per device of the leaves of a kind, or of those outside of the layers, per candidate."""
        rows = np.asarray([leaf_kind == kind for leaf_kind in self.kind], bool)
        chosen = ~self.stacked[rows] if outside else slice(None)
        return self._each(kind, num_shards, num_stages)[chosen].sum(0)

    def largest_bytes(self, kind: str, num_shards: Array, num_stages: Array) -> Array:
        """Returns the bytes per device of the largest leaf of a kind, one entry per candidate; 0 without any."""
        counts = np.asarray([count for leaf, count in zip(self.kind, self.counts, strict=True) if leaf == kind], int)
        return (self._each(kind, num_shards, num_stages) / counts[:, None]).max(0, initial=0.0)

    def least_bytes(self, num_shards: Array, num_stages: Array, num_microbatches: Array, scale: Array) -> Array:
        """Returns the bytes per device that every variant of the step needs, one entry per candidate.

        They are those of the state, the batch and the accumulated gradients.
        """
        by_kind = {kind: self.local_bytes(kind, num_shards, num_stages) for kind in (*STATE_GROUPS, "gradient")}
        by_kind["batch"] = by_kind["batch"] * scale * num_microbatches
        by_kind["gradient"] = np.where(num_microbatches > 1, by_kind["gradient"], 0.0)
        return np.asarray(sum(by_kind.values()))

    def _each(self, kind: str, num_shards: Array, num_stages: Array) -> Array:
        """Returns the bytes per device of every row of a kind."""
        rows = np.asarray([leaf_kind == kind for leaf_kind in self.kind], bool)
        local = self.num_bytes[rows, None] / num_shards[self.axes[rows]]
        return np.asarray(local / np.where(self.stacked[rows, None], num_stages, 1))


def state_of(resolver: Resolver, offload: Sequence[str] = (), left_out: Container[int | None] = ()) -> State:
    """Returns the leaves of the state and of the batch, sharded as in the plan's placements.

    Leaves of the kinds in `offload` have the kind `OFFLOADED`. Those with a class in `left_out` are not counted.
    """
    program = resolver.program
    bits = {axis: 1 << index for index, axis in enumerate(resolver.mesh.names)}
    classes = program.step.axes.classes
    alike = defaultdict[tuple[object, bool], list[tuple[Leaf, Labels]]](list)
    for leaf, value in zip((*program.leaves, *program.batch), program.step.graph.body.inputs, strict=True):
        labels = classes[value]
        if not any(label in left_out for label in labels):
            alike[resolver.placed_by(leaf, labels), leaf.path in program.frozen].append((leaf, labels))
    rows = defaultdict[tuple[str, Tiled], int](int)
    counts = defaultdict[tuple[str, Tiled], int](int)
    for (_, is_frozen), leaves in alike.items():
        leaf, labels = leaves[0]
        specs = {OFFLOADED if is_offloaded(leaf, offload) else leaf.kind: resolver.placed(leaf, labels)[0]}
        if leaf.kind == "param" and not is_frozen:
            specs["gradient"] = resolver.stored(resolver.used(labels, leaf.shape), labels, leaf.shape, "gradient")
        for kind, spec in specs.items():
            tiled = _argument(leaf, labels, as_masks(spec, bits), program.step.layer_labels, kind == "batch")
            row = kind, tiled._replace(lookups=int(is_table(labels, program.step.looked_up)))
            rows[row] += leaf.num_bytes * len(leaves)
            counts[row] += len(leaves)
    return State(
        tuple(kind for kind, _ in rows),
        np.asarray([*rows.values()], float),
        np.asarray([union(tiled.axes) for _, tiled in rows], int),
        np.asarray([any(tiled.is_layers) for _, tiled in rows], bool),
        tuple(tiled for _, tiled in rows),
        np.asarray([*counts.values()], int),
    )


def _argument(leaf: Leaf, labels: Labels, axes: Masks, layers: Collection[int | None], is_batch: bool) -> Tiled:
    """Returns what the padding of a leaf depends on; a random key is stored as words."""
    itemsize = leaf.num_bytes // max(math.prod(leaf.shape), 1)
    words = (itemsize // WORD_BYTES,) if itemsize > 2 * WORD_BYTES else ()
    is_layers = tuple(label is not None and label in layers for label in labels)
    is_first = tuple(is_batch and dim == 0 for dim in range(len(labels)))
    no = (False,) * len(words)
    return Tiled(
        (*leaf.shape, *words),
        (*axes, *(0 for _ in words)),
        (*is_first, *no),
        (*is_layers, *no),
        WORD_BYTES if words else itemsize,
        is_argument=True,
    )


def is_table(labels: Labels, looked_up: Collection[int | None]) -> bool:
    """Returns whether a value without a batch is a table whose rows are looked up."""
    return len(labels) == 2 and labels[0] in looked_up


def table_copies(state: State, num_shards: Array, scale: Array, num_stages: Array) -> Array:
    """Returns the bytes of the copies of tables and of their moments in which tables are updated."""
    rows = zip(state.kind, state.tiled, state.counts, strict=True)
    tables = [(tiled, count) for kind, tiled, count in rows if tiled.lookups and kind in ("param", "optimizer")]
    copies = [count * tiled.copied_bytes(num_shards, scale, num_stages) for tiled, count in tables]
    return np.sum([np.zeros(scale.shape), *copies], 0)


def state_padding(state: State, num_shards: Array, scale: Array, num_stages: Array) -> Array:
    """Returns the bytes by which tiles pad the state and the batch, without accumulated gradients."""
    total = np.zeros(scale.shape)
    for kind, tiled, count in zip(state.kind, state.tiled, state.counts, strict=True):
        if kind not in ("gradient", OFFLOADED):
            padded, unpadded = tiled.padded(num_shards, scale, num_stages)
            total = total + count * (padded - unpadded)
    return np.maximum(total, 0.0)
