"""Routing: how the tokens of a batch come to the experts that are chosen for them, and what of it experts compute."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanax.trace.census import contraction_dims, label_key
from spanax.trace.origins import Origin

if TYPE_CHECKING:
    from spanax.trace.axes import Axes
    from spanax.trace.graph import Graph, Op

Key = tuple[int, ...]


@dataclass(frozen=True)
class Routing:
    """One class of experts, and what has a dim of it; keys are the classes of a value, in whatever order.

    Attributes:
      has_experts: whether any weight has it but those that choose: a router's outputs may be a class of their own.
      scoring: the weights by which experts are chosen.
      inside: what experts take, compute and give.
      num_tokens: the numbers of the tokens that are put together for experts, and taken apart behind them.
      num_sent: the numbers of what is made of these, example by example.
      num_pooled: the same, where an expert's tokens are of any example.
    """

    has_experts: bool
    scoring: frozenset[Key]
    inside: frozenset[Key]
    num_tokens: int
    num_sent: int
    num_pooled: int

    def is_sent(self, num_experts_ways: int, num_batch_ways: int) -> bool:
        """Whether it moves less to send experts what is theirs than to gather all tokens for each.

        Args:
          num_experts_ways: into how many parts experts are divided; outside of them the same devices divide the batch.
          num_batch_ways: into how many the batch is divided by other devices.
        """
        if not self.has_experts:  # scores alone: who computes them has the tokens
            return True
        sent = self.num_sent / (num_batch_ways * num_experts_ways) + self.num_pooled
        return 0 < sent < self.num_tokens / num_batch_ways


def routings(graph: "Graph", axes: "Axes") -> dict[int, Routing]:
    """The routing to each class of experts of a traced function."""
    named: dict[str, set[int]] = {}
    for label, name in axes.names.items():
        named.setdefault(name, set()).add(label)
    dots = [op for op in graph.ops() if op.name == "dot_general"]
    layers, batch = named.get("layers", set()), named.get("batch", set())
    return {label: _routing(dots, graph, axes, label, layers, batch) for label in named.get("experts", ())}


def is_routed(labels: tuple[int | None, ...], routings: Mapping[int, Routing], axes: "Axes") -> bool:
    """Whether a value says which experts are chosen, or is what says so, and is nothing of theirs."""
    of_experts = [routings[label] for label in labels if label is not None and label in routings]
    if not of_experts:
        return False
    key = _key(labels, [label for label, name in axes.names.items() if name == "layers"])
    is_batched = any(axes.names.get(label) == "batch" for label in labels if label is not None)
    is_number = len(key) == 1
    return any(is_number or key in one.scoring or (is_batched and key not in one.inside) for one in of_experts)


def _routing(
    dots: list["Op"], graph: "Graph", axes: "Axes", label: int, layers: Collection[int], batch: Collection[int]
) -> Routing:
    keys = {value: _key(axes.classes[value], layers) for op in dots for value in (*op.inputs[:2], op.outputs[0])}
    scoring, inside = set[Key](), set[Key]()
    for op in dots:
        for weight, other in (op.inputs[:2], op.inputs[1::-1]):
            is_weight = not axes.origins[weight] & Origin.BATCH and axes.origins[other] & Origin.BATCH
            if label not in keys[weight] or not is_weight:
                continue
            made, taken = ({*keys[value]} for value in (op.outputs[0], other))
            # One number for each expert, and nothing else that the weight alone has: a score.
            if {label} in (made - taken, taken - made):
                scoring.add(keys[weight])
            else:
                inside.update(key for key in (keys[other], keys[op.outputs[0]]) if label in key)
    counts = [0, 0, 0]
    for op in dots:
        values = (*op.inputs[:2], op.outputs[0])
        batched = {value for value in values if not {*batch}.isdisjoint(keys[value])}
        theirs = [value for value in values if keys[value] in inside]
        tokens = [value for value in batched if label not in keys[value]]
        # What says whose place a token has is met by nothing else: a product of both alone is a weight's gradient.
        if theirs and tokens and any(label in keys[value] and value not in theirs for value in batched):
            passed, classes = contraction_dims(op)[1], axes.classes[op.inputs[0]]
            by_example = any(lhs >= 0 and rhs >= 0 and classes[lhs] in batch for lhs, rhs, _ in passed)
            for value in (*tokens, *theirs):
                counts[0 if value in tokens else 1 if by_example else 2] += math.prod(graph.shape(value))
    weights = {_key(axes.classes[value], layers) for value in graph.body.inputs if axes.origins[value] == Origin.PARAM}
    has_experts = any(label in key for key in weights - scoring)
    return Routing(has_experts, frozenset(scoring), frozenset(inside - scoring), *counts)


def _key(labels: tuple[int | None, ...], layers: Collection[int]) -> Key:
    return label_key([label for label in labels if label not in layers])
