"""A traced function: its graph, its axes, and analyses that do not depend on a layout."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spanax.displays import display
from spanax.trace.analysis.fusion import Kept, memory_plan
from spanax.trace.analysis.gradient_accumulation import GradientSum, gradient_sums
from spanax.trace.analysis.leaf_aliases import updated_aliases
from spanax.trace.analysis.liveness import Liveness, liveness
from spanax.trace.analysis.moe_routing import Labels, Routing, routed, routings
from spanax.trace.analysis.op_groups import (
    OpGroup,
    Traffic,
    inert_ops,
    label_key,
    layer_carry,
    op_groups,
    score_keys,
    traffic,
)
from spanax.trace.analysis.order import order
from spanax.trace.analysis.sharding_keys import MOVEMENT, ShardingKey, sharding_keys
from spanax.trace.axes.axes import Axes
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op
from spanax.trace.jaxpr.provenance import Origin

SPREADING = MOVEMENT | {Family.ELEMENTWISE}
"""Operations whose result is uniform if all operands are uniform."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function of (state, batch) with its axes: the train step, or the evaluation."""

    graph: Graph
    axes: Axes
    result: Any
    has_remat: bool = False

    def _repr_html_(self) -> str | None:
        return display(self)

    @cached_property
    def sharding_keys(self) -> list[ShardingKey]:
        """Returns the sharding key of every value, by index."""
        return sharding_keys(self.graph, self.axes, self.routed)

    @cached_property
    def routings(self) -> dict[int, Routing]:
        """Returns, for each class of experts, how tokens are dispatched to them."""
        return routings(self)

    @cached_property
    def routed(self) -> frozenset[Labels]:
        """Returns the classes of values that select experts."""
        return routed(self)

    @cached_property
    def worked(self) -> frozenset[int]:
        """Returns the classes of dims of weights and activations, except those that only router scores have.

        Experts in a Python loop have a router whose scores are a separate class: sharding that class would partition
        neither the weights of the experts nor their compute.
        """
        worked = {labels for labels in self.axes.classes if labels not in self.routed}
        return frozenset(label for labels in worked for label in labels if label is not None)

    @cached_property
    def op_groups(self) -> list[OpGroup]:
        """Returns the groups of equal operations, each with its number of runs."""
        return op_groups(self)

    @cached_property
    def alike(self) -> dict[Op, Op]:
        """Returns, for every operation, the first operation of its group."""
        return {op: group.op for group in self.op_groups for op, _ in group.ops}

    @cached_property
    def gradient_sums(self) -> list[GradientSum]:
        """Returns the sums of results that have no other consumer."""
        return gradient_sums(self)

    @cached_property
    def memory_traffic(self) -> Traffic:
        """Returns the reads and writes of fused kernels."""
        return traffic(self)

    @cached_property
    def score_keys(self) -> frozenset[tuple[int | None, ...]]:
        """Returns the labels of attention scores and of similar contractions of two activations."""
        return score_keys(self)

    @cached_property
    def kept(self) -> dict[Body, Kept]:
        """Returns, for every body, the values stored in memory between kernels."""
        return memory_plan(self.graph)

    @cached_property
    def order(self) -> dict[Body, tuple[Op, ...]]:
        """Returns, for every body, its operations in execution order."""
        return order(self)

    @cached_property
    def liveness(self) -> dict[Body, Liveness]:
        """Returns, for every body, the live ranges of its values."""
        return liveness(self, in_matmuls=False)

    @cached_property
    def tpu_liveness(self) -> dict[Body, Liveness]:
        """Returns the live ranges where the compiler fuses producers into matmuls."""
        return liveness(self, in_matmuls=True)

    @cached_property
    def next_versions(self) -> dict[int, list[int]]:
        """Returns, for every value, its aliases in another dtype or order, one operation away."""
        return updated_aliases(self)

    @cached_property
    def inert(self) -> frozenset[Op]:
        """Returns elementwise operations whose values have equal shardings in any layout, so that none is resharded."""
        return inert_ops(self)

    @cached_property
    def uniform(self) -> frozenset[int]:
        """Returns the values whose elements are all equal: each device computes its shard without communication."""
        values = set[int]()
        for op in self.graph.ops():
            if (
                op.family in SPREADING
                and op.inputs
                and all(value in values or not self.graph.shape(value) for value in op.inputs)
            ):
                values.update(op.outputs)
        return frozenset(values)

    @cached_property
    def labels_by_name(self) -> dict[str, list[int]]:
        """Returns classes by name and by use, in the order in which contractions compute with them."""
        axes = self.axes
        order: dict[int, None] = {}
        for op in self.graph.ops():
            if op.name in CONTRACTIONS:
                order |= {label: None for label in axes.classes[op.outputs[0]] if label is not None}
        order |= {label: None for label in sorted(axes.names)}
        by_name: dict[str, list[int]] = {}
        for label in order:
            for names in (axes.names, axes.uses):
                if label in names:
                    by_name.setdefault(names[label], []).append(label)
        return by_name

    @cached_property
    def score_labels(self) -> frozenset[tuple[int | None, ...]]:
        """Returns the labels of attention scores, also with stacked layers."""
        keys = {
            labels: [label for label in labels if label not in self.layer_labels] for labels in set(self.axes.classes)
        }
        return frozenset(labels for labels, key in keys.items() if label_key(key) in self.score_keys)

    @cached_property
    def mapped_meshes(self) -> frozenset[tuple[tuple[str, int], ...]]:
        """Returns the multi-device meshes of the user's `jax.shard_map` calls: axes with their sizes."""
        meshes = (op.params["mesh"] for op in self.graph.ops() if op.name == "shard_map")
        return frozenset(tuple(mesh.shape.items()) for mesh in meshes if mesh.size > 1)

    @cached_property
    def layer_carry(self) -> tuple[int | None, int]:
        """Returns the largest carry between layers, and the number of layers."""
        return layer_carry(self)

    @cached_property
    def layer_labels(self) -> frozenset[int | None]:
        """Returns the classes of dims along which layers are stacked."""
        return frozenset(self.labels_by_name.get("layers", ()))

    @cached_property
    def looked_up(self) -> frozenset[int | None]:
        """Returns the classes along which tables are indexed; if sharded along others, lookups are local."""
        return frozenset(
            self.axes.classes[op.inputs[0]][dim]
            for op in self.graph.ops()
            if op.family is Family.GATHER and not self.axes.origins[op.inputs[0]] & Origin.BATCH
            for dim in op.params["dimension_numbers"].start_index_map
        )

    @cached_property
    def batch_labels(self) -> frozenset[int | None]:
        """Returns the classes of dims that grow with the batch."""
        return frozenset(label for label, name in self.axes.names.items() if name == "batch")

    @property
    def num_results(self) -> int:
        """Returns the number of outputs after the new state."""
        return self.result.num_leaves
