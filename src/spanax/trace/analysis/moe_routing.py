"""Finds how tokens are dispatched to experts, and the operations that the experts compute."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from spanax.trace.analysis.labels import Key, Labels, label_key
from spanax.trace.axes.axes import Axes
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.provenance import Origin


@dataclass(frozen=True)
class Routing:
    """One class of experts, and the values with a dim of it; keys are the sorted classes of a value.

    Attributes:
      has_experts: whether a weight other than the router's has it: router outputs may be a separate class.
      scoring: keys of the router weights, which score experts.
      inside: keys of the inputs, intermediate values and outputs of experts.
      num_tokens: elements of the tokens dispatched to experts and combined after them.
      num_sent: elements of the dispatched values, with a batch dim.
      num_pooled: the same without a batch dim, where the tokens of an expert come from any example.
    """

    has_experts: bool
    scoring: frozenset[Key]
    inside: frozenset[Key]
    num_tokens: int
    num_sent: int
    num_pooled: int

    def is_sent(self, num_experts_ways: int, num_batch_ways: int) -> bool:
        """Returns whether dispatching tokens to experts moves less data than gathering all tokens for each.

        Args:
          num_experts_ways: number of shards of the experts; outside the experts, the same devices shard the batch.
          num_batch_ways: number of shards of the batch over all other devices.
        """
        if not self.has_experts:  # scores only: the device that computes them has the tokens
            return True
        sent = self.num_sent / (num_batch_ways * num_experts_ways) + self.num_pooled
        return 0 < sent < self.num_tokens / num_batch_ways


def routings(
    graph: Graph, axes: Axes, experts: Sequence[int], batch: frozenset[int | None], layers: Collection[int | None]
) -> dict[int, Routing]:
    """Returns the routing of each class of experts.

    Args:
      graph: the operations of a traced function.
      axes: its axes.
      experts: the classes of experts.
      batch: the classes of batch dims.
      layers: the classes of dims along which layers are stacked.
    """
    dots = [op for op in graph.ops() if op.name == "dot_general"]
    keys = {value: _key(axes.classes[value], layers) for op in dots for value in (*op.inputs[:2], op.outputs[0])}
    params = [value for value in graph.body.inputs if axes.origins[value] == Origin.PARAM]
    weights = {_key(axes.classes[value], layers) for value in params}
    return {label: _routing(graph, axes, dots, keys, weights, batch, label) for label in experts}


def routed(
    axes: Axes, routings: Mapping[int, Routing], batch: frozenset[int | None], layers: Collection[int | None]
) -> frozenset[Labels]:
    """Returns the classes of router weights, scores and dispatch masks, which are not values of experts."""

    def is_routed(labels: Labels) -> bool:
        matches = [routings[label] for label in labels if label is not None and label in routings]
        key = _key(labels, layers)
        is_number, is_batched = len(key) == 1, not batch.isdisjoint(labels)
        return any(
            is_number or key in routing.scoring or (is_batched and key not in routing.inside) for routing in matches
        )

    return frozenset(filter(is_routed, {*axes.classes}))


def _routing(
    graph: Graph,
    axes: Axes,
    dots: Sequence[Op],
    keys: Mapping[int, Key],
    weights: Collection[Key],
    batch: frozenset[int | None],
    label: int,
) -> Routing:
    scoring, inside = set[Key](), set[Key]()
    for op in dots:
        for weight, activation in (op.inputs[:2], op.inputs[1::-1]):
            is_weight = not axes.origins[weight] & Origin.BATCH and axes.origins[activation] & Origin.BATCH
            if label not in keys[weight] or not is_weight:
                continue
            # A score: the expert dim is the only free dim of the weight.
            if [label] in _free_and_contracted(op, weight, axes.classes[weight]):
                scoring.add(keys[weight])
            else:
                inside.update(key for key in (keys[activation], keys[op.outputs[0]]) if label in key)
    counts = [0, 0, 0]
    for op in dots:
        values = (*op.inputs[:2], op.outputs[0])
        batched = {value for value in values if not batch.isdisjoint(keys[value])}
        expert_values = [value for value in values if keys[value] in inside]
        tokens = [value for value in batched if label not in keys[value]]
        # Only a dispatch mask is contracted with both; a product of tokens and expert values is a weight gradient.
        if expert_values and tokens and any(label in keys[value] and value not in expert_values for value in batched):
            triples, classes = op.dim_map.contraction[1], axes.classes[op.inputs[0]]
            by_example = any(lhs >= 0 and rhs >= 0 and classes[lhs] in batch for lhs, rhs, _ in triples)
            for value in (*tokens, *expert_values):
                counts[0 if value in tokens else 1 if by_example else 2] += math.prod(graph.shape(value))
    has_experts = any(label in key for key in weights if key not in scoring)
    return Routing(has_experts, frozenset(scoring), frozenset(inside - scoring), *counts)


def _free_and_contracted(op: Op, weight: int, labels: Labels) -> tuple[list[int | None], list[int | None]]:
    """Returns the classes of the free dims of a weight in a contraction, and of its contracted dims.

    Counted by dim: experts that map an axis to itself (a residual stream) have its class twice and are not scores.
    """
    side, (contracted, _) = op.inputs[:2].index(weight), op.dim_map.contraction
    return [labels[dim] for dim in op.dim_map.free_dims[side]], [labels[dims[side]] for dims in contracted]


def _key(labels: Labels, layers: Collection[int | None]) -> Key:
    return label_key([label for label in labels if label not in layers])
