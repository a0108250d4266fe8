"""Analyses of a traced function that do not depend on a layout, each computed once."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spanax.trace.analysis.accumulation import SumFlow, accumulated, invariant, recurrences
from spanax.trace.analysis.fusion import Kept, memory_plan, repeated_ops
from spanax.trace.analysis.labels import (
    HiddenWeight,
    Key,
    Labels,
    hidden_weights,
    labels_by_name,
    looked_up_labels,
    score_labels,
    worked_labels,
)
from spanax.trace.analysis.liveness import Liveness, alias_pairs, liveness, order
from spanax.trace.analysis.moe_routing import (
    ActiveFlops,
    Routing,
    active_flops,
    chosen_experts,
    one_hot_labels,
    routed,
    routings,
)
from spanax.trace.analysis.op_groups import (
    GradientSum,
    OpGroup,
    Phase,
    Traffic,
    gradient_sums,
    inert_ops,
    layer_carry,
    op_groups,
    score_keys,
    traffic,
)
from spanax.trace.analysis.sharding_keys import ShardingKey, joined_keys, sharding_keys, uniform_values
from spanax.trace.analysis.sorted_rows import SortedRows, sorted_rows
from spanax.trace.axes.axes import Axes, Traced
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op
from spanax.trace.jaxpr.provenance import reachable

LAYOUT_FREE = (
    "labels_by_name",
    "batch_labels",
    "layer_labels",
    "routings",
    "routed",
    "looked_up",
    "hidden",
    "recurrences",
    "sum_flow",
    "sorted_rows",
    "accumulated",
    "views",
    "host_copies",
    "spatial_labels",
    "score_labels",
    "memory_plans",
    "order",
    "divided",
    "inert",
    "repeated",
    "uniform",
    "layer_carry",
)
"""The analyses that do not depend on which values have one sharding key."""


@dataclass(frozen=True, eq=False)
class StepAnalysis:
    """A traced function with its analyses."""

    traced: Traced

    @cached_property
    def graph(self) -> Graph:
        """Returns the operations of the function."""
        return self.traced.graph

    @cached_property
    def axes(self) -> Axes:
        """Returns the classes of the dims of all values, and their names."""
        return self.traced.axes

    @property
    def result(self) -> Any:
        """Returns the structure of the outputs after the new state."""
        return self.traced.result

    @property
    def num_results(self) -> int:
        """Returns the number of outputs after the new state."""
        return self.traced.num_results

    def rename(self, names: Mapping[str, str]) -> "StepAnalysis":
        """Returns the analyses of the same function with renamed axes."""
        return StepAnalysis(replace(self.traced, axes=self.axes.renamed(names)))

    def joined(self, colors: Mapping[int, int], weights: Collection[Key], marked: Collection[Labels]) -> "StepAnalysis":
        """Returns the analyses with equal keys for values that differ only in classes of one color.

        The equal layers of an unrolled model are priced once. Programs with few equal classes are priced as they are.

        Args:
          colors: for each class, a number; all layouts that the result is used for shard classes of one number alike.
          weights: the sorted classes of every parameter.
          marked: classes of values that are priced in another way than others.
        """
        of = tuple(colors.values())
        if 2 * len({*of}) > len(of):
            return self
        if of not in self._joined:
            result = replace(self)
            shared = {name: getattr(self, name) for name in LAYOUT_FREE}
            keys = joined_keys(self.sharding_keys, colors, weights, (self.score_labels, marked))
            groups = op_groups(self.traced, keys, self.layer_labels, is_joined=True)
            vars(result).update(shared, sharding_keys=keys, op_groups=groups)
            self._joined[of] = result
        return self._joined[of]

    @cached_property
    def _joined(self) -> dict[object, "StepAnalysis"]:
        return {}

    @cached_property
    def labels_by_name(self) -> dict[str, list[int]]:
        """Returns classes by name and by use, in the order in which contractions compute with them."""
        return labels_by_name(self.graph, self.axes)

    @cached_property
    def batch_labels(self) -> frozenset[int | None]:
        """Returns the classes of dims that grow with the batch."""
        return frozenset(label for label, name in self.axes.names.items() if name == "batch")

    @cached_property
    def layer_labels(self) -> frozenset[int | None]:
        """Returns the classes of dims along which layers are stacked."""
        return frozenset(self.labels_by_name.get("layers", ()))

    @cached_property
    def routings(self) -> dict[int, Routing]:
        """Returns, for each class of experts, how tokens are dispatched to them."""
        experts = self.labels_by_name.get("experts", ())
        return routings(self.graph, self.axes, experts, self.batch_labels, self.layer_labels)

    @cached_property
    def chosen_experts(self) -> dict[int, int]:
        """Returns the indices of chosen experts, each with the number of experts."""
        return chosen_experts(self.graph, self.axes, self.routings, self.op_groups)

    @cached_property
    def active(self) -> ActiveFlops:
        """Returns the FLOPs of the forward pass's contractions with weights that each token uses."""
        groups = [group for group in self.op_groups if group.phase == Phase.FORWARD and group.op.name in CONTRACTIONS]
        one_hots = [self.axes.classes[value][dim] for value, dim in one_hot_labels(self.graph, self.op_groups)]
        labels = [label for label in dict.fromkeys((*self.routings, *one_hots)) if label is not None]
        by_label = routings(self.graph, self.axes, labels, self.batch_labels, self.layer_labels)
        return active_flops(self.graph, self.axes, by_label, self.layer_labels, groups, self.op_groups)

    @cached_property
    def routed(self) -> frozenset[Labels]:
        """Returns the classes of values that select experts."""
        return routed(self.axes, self.routings, self.batch_labels, self.layer_labels)

    @cached_property
    def worked(self) -> frozenset[int]:
        """Returns the classes of dims that divide work or storage, except those that only router scores have."""
        return worked_labels(self.graph, self.axes, self.routed)

    @cached_property
    def looked_up(self) -> frozenset[int | None]:
        """Returns the classes along which tables are indexed; if sharded along others, lookups are local."""
        return looked_up_labels(self.graph, self.axes)

    @cached_property
    def hidden(self) -> dict[int, list[HiddenWeight]]:
        """Returns the weights of each class that only activations between them have."""
        found = hidden_weights(self.graph, self.axes, self.batch_labels)
        excluded = {*self.axes.wholes, *self.layer_labels, *self.looked_up}
        return {label: weights for label, weights in found.items() if label not in excluded}

    @cached_property
    def sharding_keys(self) -> list[ShardingKey]:
        """Returns the sharding key of every value, by index."""
        once = self.accumulated | invariant(self.graph, self.recurrences)
        return sharding_keys(self.graph, self.axes, self.routed, once, self.sorted_rows, self.uniform)

    @cached_property
    def sorted_rows(self) -> SortedRows:
        """Returns the rows sorted by expert that each device may sort for itself."""
        return sorted_rows(self.graph)

    @cached_property
    def recurrences(self) -> list[Op]:
        """Returns the loops in which every iteration needs all weights."""
        return recurrences(self.graph, self.batch_labels, self.axes.classes)

    @cached_property
    def views(self) -> dict[int, int]:
        """The view of each result of a matmul that nothing else reads, where heads have queries of one key."""
        readers = self.graph.readers
        result = {}
        for op in self.graph.ops() if self.axes.groups else ():
            if op.name in CONTRACTIONS:
                view = op.outputs[0]
                while len(readers[view]) == 1 and readers[view][0].family is Family.VIEW:
                    (view,) = readers[view][0].outputs
                result[op.outputs[0]] = view
        return result

    @cached_property
    def sum_flow(self) -> SumFlow:
        """How the step uses sums."""
        return SumFlow.of(self.graph)

    @cached_property
    def accumulated(self) -> frozenset[int]:
        """Returns the values in recurrences that contain sums which the loops only accumulate."""
        return accumulated(self.graph, self.recurrences)

    @cached_property
    def first_values(self) -> list[int]:
        """Returns the first value with each sharding key, by the number of the key."""
        firsts = dict[int, int]()
        for value, key in enumerate(self.sharding_keys):
            firsts.setdefault(key.number, value)
        return [*firsts.values()]

    @cached_property
    def distinct_keys(self) -> list[ShardingKey]:
        """Returns the distinct sharding keys, in order of their numbers."""
        return [self.sharding_keys[value] for value in self.first_values]

    @cached_property
    def op_groups(self) -> list[OpGroup]:
        """Returns the groups of equal operations, each with its number of runs."""
        return op_groups(self.traced, self.sharding_keys, self.layer_labels)

    @cached_property
    def alike(self) -> dict[Op, Op]:
        """Returns, for every operation, the first operation of its group."""
        return {op: group.op for group in self.op_groups for op, _ in group.ops}

    @cached_property
    def keys_of(self) -> dict[Op, tuple[int, ...]]:
        """Returns, for the first operation of every group, the numbers of its values' sharding keys."""
        keys = self.sharding_keys
        ops = [group.op for group in self.op_groups]
        return {op: tuple(keys[value].number for value in (*op.inputs, *op.outputs)) for op in ops}

    @cached_property
    def first_ops(self) -> Mapping[str, list[Op]]:
        """Returns the first operation of every group, by name of the operation."""
        result = defaultdict[str, list[Op]](list)
        for op in self.keys_of:
            result[op.name].append(op)
        return {name: ops for name, ops in result.items()}

    @cached_property
    def wire_keys(self) -> dict[Op, tuple[int, ...]]:
        """Returns, for the first loop of every group, the sharding keys of the values outside and inside of it."""
        keys = self.sharding_keys
        wires = {group.op: self.graph.wires(group.op) for group in self.op_groups if group.op.bodies}
        return {
            op: tuple(keys[value].number for pair in (*each.inputs, *each.outputs, *each.carried) for value in pair)
            for op, each in wires.items()
        }

    @cached_property
    def updated(self) -> list[tuple[int, int]]:
        """Returns the value of every leaf of the state before and after the step."""
        body = self.graph.body
        num_leaves = len(body.outputs) - self.num_results
        return list(zip(body.inputs[:num_leaves], body.outputs[:num_leaves], strict=True))

    @cached_property
    def host_copies(self) -> list[tuple[Op, int]]:
        """Returns the copies between the memory of the devices and of the host, each with its number of runs."""
        copies = [pair for group in self.op_groups if group.op.name == "device_put" for pair in group.ops]
        is_on_host = self.graph.is_on_host
        return [(op, runs) for op, runs in copies if is_on_host(op.inputs[0]) != is_on_host(op.outputs[0])]

    @cached_property
    def gradient_sums(self) -> list[GradientSum]:
        """Returns the sums of results that have no other consumer."""
        return gradient_sums(self.graph, self.memory_plans, self.op_groups)

    @cached_property
    def memory_traffic(self) -> Traffic:
        """Returns the reads and writes of fused kernels."""
        return traffic(self.traced, self.sharding_keys, self.op_groups, self.batch_labels, self.layer_labels)

    @cached_property
    def touched_bytes(self) -> list[tuple[int, tuple[bool, int, bool, bool], float]]:
        """Returns the bytes that fused kernels read and write, by the number of the sharding key and by place.

        A place is whether the values grow with the batch, the phase, whether it is in the layers, and whether the
        values are attention scores.
        """
        result = list[tuple[int, tuple[bool, int, bool, bool], float]]()
        for value, phase, in_layers, times in self.memory_traffic.touched:
            key = self.sharding_keys[value]
            is_batched = not self.batch_labels.isdisjoint(key.labels)
            is_score = key.labels in self.score_labels
            place = is_batched, phase, in_layers, is_score
            result.append((key.number, place, times * self.graph.num_bytes(value)))
        return result

    @cached_property
    def spatial_labels(self) -> frozenset[int | None]:
        """Returns the classes of dims over which the windows of convolutions slide."""
        values = [
            (value, spec)
            for op in self.first_ops.get("conv_general_dilated", ())
            for value, spec in zip((op.inputs[0], op.outputs[0]), op.params["dimension_numbers"][::2], strict=True)
        ]
        return frozenset(self.axes.classes[value][dim] for value, spec in values for dim in spec[2:]) - {None}

    @cached_property
    def score_keys(self) -> frozenset[Key]:
        """Returns the labels of attention scores and of similar contractions of two activations."""
        return score_keys(self.traced, self.op_groups, self.batch_labels)

    @cached_property
    def score_labels(self) -> frozenset[Labels]:
        """Returns the labels of attention scores, also with stacked layers."""
        return score_labels(self.axes, self.score_keys, self.layer_labels)

    @cached_property
    def memory_plans(self) -> dict[Body, Kept]:
        """Returns, for every body, the values stored in memory between kernels."""
        return memory_plan(self.graph)

    @cached_property
    def order(self) -> dict[Body, tuple[Op, ...]]:
        """Returns, for every body, its operations in execution order."""
        return order(self.graph, self.memory_plans, self.sharding_keys, self.batch_labels)

    @cached_property
    def divided(self) -> dict[Body, list[tuple[int, Op]]]:
        """Returns, for every body, its operations without bodies, each with its index in execution order."""
        return {
            body: [(index, op) for index, op in enumerate(ops) if not op.bodies] for body, ops in self.order.items()
        }

    @cached_property
    def liveness(self) -> dict[Body, Liveness]:
        """Returns, for every body, the live ranges of its values."""
        return liveness(self.traced, self.memory_plans, self.order, self.sharding_keys, in_matmuls=False)

    @cached_property
    def tpu_liveness(self) -> dict[Body, Liveness]:
        """Returns the live ranges where the compiler fuses producers into matmuls."""
        return liveness(self.traced, self.memory_plans, self.order, self.sharding_keys, in_matmuls=True)

    @cached_property
    def inert(self) -> frozenset[Op]:
        """Returns elementwise operations whose values have equal shardings in any layout, so that none is resharded."""
        return inert_ops(self.graph, self.sharding_keys)

    @cached_property
    def repeated(self) -> frozenset[Op]:
        """Returns the operations that compute what an earlier one has computed."""
        return repeated_ops(self.graph)

    @cached_property
    def uniform(self) -> frozenset[int]:
        """Returns the values whose elements are all equal: each device computes its shard without communication."""
        return uniform_values(self.graph)

    @cached_property
    def mapped_meshes(self) -> frozenset[tuple[tuple[str, int], ...]]:
        """Returns the multi-device meshes of the user's `jax.shard_map` calls: axes with their sizes."""
        meshes = (op.params["mesh"] for op in self.graph.ops() if op.name == "shard_map")
        return frozenset(tuple(mesh.shape.items()) for mesh in meshes if mesh.size > 1)

    @cached_property
    def layer_carry(self) -> tuple[int | None, int]:
        """Returns the largest carry between layers, and the number of layers."""
        return layer_carry(self.traced, self.op_groups, self.layer_labels)

    @cached_property
    def _alias_pairs(self) -> dict[int, list[int]]:
        return alias_pairs(self.traced, self.batch_labels, self.layer_labels)

    def leaf_aliases(self, leaf: int) -> frozenset[int]:
        """Returns the values that are aliases of a leaf of the state, by index.

        Two values are aliases if one is computed from the other elementwise or by data movement, and both have the
        same classes, none of them the batch. In the body of a scan over layers, the alias is one layer of its operand.

        Args:
          leaf: index of the leaf in the state.
        """
        return reachable(self.graph.body.inputs[leaf], self._alias_pairs)
