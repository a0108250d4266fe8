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
from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op
from spanax.trace.jaxpr.provenance import Origin

SPREADING = ELEMENTWISE | MOVEMENT
"""Operations that make one number all over of one number all over."""


@dataclass(frozen=True, eq=False)
class Traced:
    """One function of (state, batch) as a graph with its axes: the train step, or the evaluation."""

    graph: Graph
    axes: Axes
    result: Any
    has_remat: bool = False

    def _repr_html_(self) -> str | None:
        return display(self)

    @cached_property
    def sharding_keys(self) -> list[ShardingKey]:
        """What every value is, as far as its place depends on it, by its number."""
        return sharding_keys(self.graph, self.axes, self.routed)

    @cached_property
    def routings(self) -> dict[int, Routing]:
        """For each class of experts, how tokens come to them."""
        return routings(self)

    @cached_property
    def routed(self) -> frozenset[Labels]:
        """The classes of values that say which experts are chosen."""
        return routed(self)

    @cached_property
    def worked(self) -> frozenset[int]:
        """Classes of dims that a weight or an activation has, beyond the scores by which experts are chosen.

        Experts in a Python loop have a router whose scores are a class of their own: to shard that class would divide
        neither the weights of the experts nor their work.
        """
        worked = {labels for labels in self.axes.classes if labels not in self.routed}
        return frozenset(label for labels in worked for label in labels if label is not None)

    @cached_property
    def op_groups(self) -> list[OpGroup]:
        """Its kinds of operations, each with how often it runs."""
        return op_groups(self)

    @cached_property
    def alike(self) -> dict[Op, Op]:
        """For every operation, the one that stands for its kind."""
        return {op: kind.op for kind in self.op_groups for op, _ in kind.ops}

    @cached_property
    def gradient_sums(self) -> list[GradientSum]:
        """Results that are added to each other and read by nothing else."""
        return gradient_sums(self)

    @cached_property
    def memory_traffic(self) -> Traffic:
        """What its fused kernels read and write."""
        return traffic(self)

    @cached_property
    def score_keys(self) -> frozenset[tuple[int | None, ...]]:
        """The labels of attention scores, and of all that is as large where activations meet activations."""
        return score_keys(self)

    @cached_property
    def kept(self) -> dict[Body, Kept]:
        """For every body, the values that are kept in memory between kernels."""
        return memory_plan(self.graph)

    @cached_property
    def order(self) -> dict[Body, tuple[Op, ...]]:
        """For every body, its operations in the order in which they run."""
        return order(self)

    @cached_property
    def liveness(self) -> dict[Body, Liveness]:
        """For every body, from where to where its values are held."""
        return liveness(self, in_matmuls=False)

    @cached_property
    def tpu_liveness(self) -> dict[Body, Liveness]:
        """The same, where the compiler makes what matmuls read inside of them."""
        return liveness(self, in_matmuls=True)

    @cached_property
    def next_versions(self) -> dict[int, list[int]]:
        """For every value, those that are the same in another dtype or order, one operation away."""
        return updated_aliases(self)

    @cached_property
    def inert(self) -> frozenset[Op]:
        """Elementwise operations whose values any layout splits alike, so that nothing ever moves for them."""
        return inert_ops(self)

    @cached_property
    def uniform(self) -> frozenset[int]:
        """Values that are one number all over: every device makes its own, however they are split."""
        found = set[int]()
        for op in self.graph.ops():
            if (
                op.name in SPREADING
                and op.inputs
                and all(value in found or not self.graph.shape(value) for value in op.inputs)
            ):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def labels_by_name(self) -> dict[str, list[int]]:
        """Classes by name and by use, in the order in which the program computes with them."""
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
        """The labels of values that are attention scores, or those of several layers."""
        keys = {labels: [one for one in labels if one not in self.layer_labels] for labels in set(self.axes.classes)}
        return frozenset(labels for labels, of_one in keys.items() if label_key(of_one) in self.score_keys)

    @cached_property
    def mapped_meshes(self) -> frozenset[tuple[tuple[str, int], ...]]:
        """The meshes, of several devices, that a `jax.shard_map` of the user runs over: axes with their sizes."""
        meshes = (op.params["mesh"] for op in self.graph.ops() if op.name == "shard_map")
        return frozenset(tuple(mesh.shape.items()) for mesh in meshes if mesh.size > 1)

    @cached_property
    def layer_carry(self) -> tuple[int | None, int]:
        """The largest value that goes from one layer to the next, and how many layers there are."""
        return layer_carry(self)

    @cached_property
    def layer_labels(self) -> frozenset[int | None]:
        """The classes of dims along which layers are stacked."""
        return frozenset(self.labels_by_name.get("layers", ()))

    @cached_property
    def looked_up(self) -> frozenset[int | None]:
        """The classes along which tables are looked up: split along another, a table answers where it lies."""
        return frozenset(
            self.axes.classes[op.inputs[0]][dim]
            for op in self.graph.ops()
            if op.name == "gather" and not self.axes.origins[op.inputs[0]] & Origin.BATCH
            for dim in op.params["dimension_numbers"].start_index_map
        )

    @cached_property
    def batch_labels(self) -> frozenset[int | None]:
        """The classes of dims that grow with the batch."""
        return frozenset(label for label, name in self.axes.names.items() if name == "batch")

    @property
    def num_results(self) -> int:
        """How many outputs the function has beside the new state."""
        return self.result.num_leaves
