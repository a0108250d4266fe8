"""Finds how tokens are dispatched to experts, and the operations that the experts compute."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spanax.trace.analysis.labels import Key, Labels, label_key
from spanax.trace.analysis.op_groups import OpGroup, Phase, contraction_flops, num_groups
from spanax.trace.axes.axes import Axes
from spanax.trace.jaxpr.counted import CHOOSING, chosen_dim
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.provenance import Origin

VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type")
"""Operations between chosen indices and their one-hots, and between experts and the slots of groups of tokens."""


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
    """Returns the routing of each class of experts."""
    dots = [op for op in graph.ops() if op.name == "dot_general"]
    values = {value for op in dots for value in (*op.inputs[:2], op.outputs[0])}
    values |= {graph.origin(value, VIEWS) for value in values}
    keys = {value: _key(axes.classes[value], layers) for value in values}
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
        is_number = len(key) == 1
        is_batched = not batch.isdisjoint(labels)
        return any(
            is_number or key in routing.scoring or (is_batched and key not in routing.inside) for routing in matches
        )

    return frozenset(filter(is_routed, {*axes.classes}))


@dataclass(frozen=True)
class ActiveFlops:
    """The FLOPs of contractions with the experts that tokens are routed to, and with all other weights.

    Attributes:
      flops: their sum.
      is_exact: whether unchosen experts are excluded; if not, the program does not show which experts a token is
        routed to, and all products count.
    """

    flops: float
    is_exact: bool


def active_flops(
    graph: Graph,
    axes: Axes,
    routings: Mapping[int, Routing],
    layers: Collection[int | None],
    groups: Iterable[OpGroup],
    choices: Iterable[OpGroup],
) -> ActiveFlops:
    """Returns the FLOPs of contractions without those of unchosen experts, empty slots, and dispatch by one-hots.

    A top-k over experts routes each row of its operand to k of them, and each of these choices requires one product
    with every element of one expert's weight. More products are those of unchosen experts or of empty slots.

    Source: model FLOPs over active parameters, as of Fedus et al., "Switch Transformers", 2021 (arXiv 2101.03961).
    """
    chosen = _num_chosen(axes, graph, routings, choices)
    total = 0.0
    computed = set[int]()
    is_exact = True
    for group in groups:
        op = group.op
        flops = contraction_flops(graph, group.op)
        computed.add(num_groups(graph, op))
        keys = [_key(axes.classes[value], layers) for value in (*op.inputs[:2], op.outputs[0])]
        for label, routing in routings.items():
            weights = [value for value, key in zip(op.inputs[:2], keys, strict=False) if label in key]
            weights = [value for value in weights if _is_expert(axes, routing, value, layers)]
            if weights:
                shape = graph.shape(weights[0])
                num_experts = shape[axes.classes[weights[0]].index(label)]
                num_rows = chosen.get((num_experts, group.ops[0][1]))
                computed.add(num_experts)
                is_exact &= num_rows is not None
                flops = flops if num_rows is None else min(flops, 2 * num_rows * math.prod(shape) // num_experts)
            elif _is_dispatch(axes, routing, op, keys, label):
                flops = 0
        total += group.runs * flops
    return ActiveFlops(total, is_exact and all(num_experts in computed for num_experts, _ in chosen))


def _num_chosen(
    axes: Axes, graph: Graph, routings: Mapping[int, Routing], groups: Iterable[OpGroup]
) -> dict[tuple[int, int], int]:
    """Returns the number of rows routed to experts, by the number of experts and the number of runs of the top-k.

    By size, since the one-hots of chosen indices may have another class than the scores.
    """
    result = defaultdict[tuple[int, int], int](int)
    for op, runs, value, number in _choices(graph, groups):
        if axes.classes[op.inputs[0]][chosen_dim(op)] in routings:
            key = number, runs
            result[key] = max(result[key], math.prod(graph.shape(value)))
    return result


def _choices(graph: Graph, groups: Iterable[OpGroup]) -> Iterator[tuple[Op, int, int, int]]:
    """Yields operations that choose, each with its number of runs, its indices, and the number of options."""
    for group in groups:
        for op, runs in group.ops if group.op.name in CHOOSING else ():
            yield op, runs, op.outputs[CHOOSING[op.name]], graph.shape(op.inputs[0])[chosen_dim(op)]


def chosen_experts(graph: Graph, axes: Axes, routings: Collection[int], groups: Iterable[OpGroup]) -> dict[int, int]:
    """Returns the indices of chosen experts, as values of the forward pass, each with the number of experts."""
    forward = (group for group in groups if group.phase is Phase.FORWARD)
    return {
        value: number
        for op, _, value, number in _choices(graph, forward)
        if axes.classes[op.inputs[0]][chosen_dim(op)] in routings
    }


def one_hot_labels(graph: Graph, groups: Iterable[OpGroup]) -> list[tuple[int, int]]:
    """Returns the dims of experts in one-hots of chosen indices: each a value and one of its dims.

    A one-hot compares indices with all experts; its dim of experts need not have the class of the scores' dim.
    """
    groups = list(groups)
    chosen = {value: number for op, _, value, number in _choices(graph, groups) if op.name == "top_k"}
    result = []
    for op in (op for group in groups for op, _ in group.ops):
        values = [graph.origin(value, VIEWS) for value in op.inputs] if op.name == "eq" else []
        for value in values:
            shape = graph.shape(op.outputs[0])
            if value in chosen and chosen[value] in shape:
                result.append((op.outputs[0], len(shape) - 1 - shape[::-1].index(chosen[value])))
    return result


def _is_expert(axes: Axes, routing: Routing, value: int, layers: Collection[int | None]) -> bool:
    """Returns whether a value is a weight of experts, and not of their router."""
    return not axes.origins[value] & Origin.BATCH and _key(axes.classes[value], layers) not in routing.scoring


def _is_dispatch(axes: Axes, routing: Routing, op: Op, keys: Sequence[Key], label: int) -> bool:
    """Returns whether a contraction moves tokens to experts or back: its mask has experts, and its tokens have none."""
    pairs = zip((*op.inputs[:2], op.outputs[0]), keys, strict=True)
    batched = [key for value, key in pairs if axes.origins[value] & Origin.BATCH]
    inside = [key for key in batched if key in routing.inside]
    masks = [key for key in batched if label in key and key not in routing.inside]
    return bool(inside and masks and any(label not in key for key in batched))


def _routing(
    graph: Graph,
    axes: Axes,
    dots: Sequence[Op],
    keys: Mapping[int, Key],
    weights: Collection[Key],
    batch: frozenset[int | None],
    label: int,
) -> Routing:
    scoring = set[Key]()
    inside = set[Key]()
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
    for op in dots:  # experts may have one dim for what is a dim of groups and one of slots outside of them
        for value in op.inputs[:2]:
            both = {keys[value], keys[graph.origin(value, VIEWS)]}
            if not inside.isdisjoint(both):
                inside.update(key for key in both if label in key)
    num_tokens = 0
    num_sent = 0
    num_pooled = 0
    for op in dots:
        values = (*op.inputs[:2], op.outputs[0])
        batched = {value for value in values if not batch.isdisjoint(keys[value])}
        expert_values = [value for value in values if keys[value] in inside]
        tokens = [value for value in batched if label not in keys[value]]
        # Only a dispatch mask is contracted with both; a product of tokens and expert values is a weight gradient.
        if expert_values and tokens and any(label in keys[value] and value not in expert_values for value in batched):
            triples = op.dim_map.contraction[1]
            classes = axes.classes[op.inputs[0]]
            by_example = any(lhs >= 0 and rhs >= 0 and classes[lhs] in batch for lhs, rhs, _ in triples)
            num_tokens += sum(math.prod(graph.shape(value)) for value in tokens)
            dispatched = sum(math.prod(graph.shape(value)) for value in expert_values if value not in tokens)
            if by_example:
                num_sent += dispatched
            else:
                num_pooled += dispatched
    has_experts = any(label in key for key in weights if key not in scoring)
    return Routing(has_experts, frozenset(scoring), frozenset(inside - scoring), num_tokens, num_sent, num_pooled)


def _free_and_contracted(op: Op, weight: int, labels: Labels) -> tuple[list[int | None], list[int | None]]:
    """Returns the classes of the free dims of a weight in a contraction, and of its contracted dims.

    Counted by dim: experts that map an axis to itself (a residual stream) have its class twice and are not scores.
    """
    side = op.inputs[:2].index(weight)
    contracted, _ = op.dim_map.contraction
    return [labels[dim] for dim in op.dim_map.free_dims[side]], [labels[dims[side]] for dims in contracted]


def _key(labels: Labels, layers: Collection[int | None]) -> Key:
    return label_key([label for label in labels if label not in layers])
