"""Finds how tokens are dispatched to experts, and the operations that the experts compute."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanax.trace.analysis.op_groups import contraction_dims, label_key
from spanax.trace.jaxpr.provenance import Origin

if TYPE_CHECKING:
    from spanax.trace.jaxpr.graph import Op
    from spanax.trace.traced import Traced

Labels = tuple[int | None, ...]
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


def routings(traced: "Traced") -> dict[int, Routing]:
    """The routing to each class of experts of a traced function."""
    dots = [op for op in traced.graph.ops() if op.name == "dot_general"]
    return {label: _routing(dots, traced, label) for label in traced.labels_by_name.get("experts", ())}


def routed(traced: "Traced") -> frozenset[Labels]:
    """The classes of values that say which experts are chosen, or are what says so, and are nothing of theirs."""
    return frozenset(labels for labels in {*traced.axes.classes} if _is_routed(labels, traced))


def _is_routed(labels: Labels, traced: "Traced") -> bool:
    of_experts = [traced.routings[label] for label in labels if label is not None and label in traced.routings]
    if not of_experts:
        return False
    key = _key(labels, traced)
    is_number, is_batched = len(key) == 1, not traced.batch_labels.isdisjoint(labels)
    return any(is_number or key in one.scoring or (is_batched and key not in one.inside) for one in of_experts)


def _routing(dots: Sequence["Op"], traced: "Traced", label: int) -> Routing:
    graph, axes, batch = traced.graph, traced.axes, traced.batch_labels
    keys = {value: _key(axes.classes[value], traced) for op in dots for value in (*op.inputs[:2], op.outputs[0])}
    scoring, inside = set[Key](), set[Key]()
    for op in dots:
        for weight, other in (op.inputs[:2], op.inputs[1::-1]):
            is_weight = not axes.origins[weight] & Origin.BATCH and axes.origins[other] & Origin.BATCH
            if label not in keys[weight] or not is_weight:
                continue
            # One number for each expert, and nothing else that the weight alone has: a score.
            if [label] in _own_dims(op, weight, axes.classes[weight]):
                scoring.add(keys[weight])
            else:
                inside.update(key for key in (keys[other], keys[op.outputs[0]]) if label in key)
    counts = [0, 0, 0]
    for op in dots:
        values = (*op.inputs[:2], op.outputs[0])
        batched = {value for value in values if not batch.isdisjoint(keys[value])}
        theirs = [value for value in values if keys[value] in inside]
        tokens = [value for value in batched if label not in keys[value]]
        # What says whose place a token has is met by nothing else: a product of both alone is a weight's gradient.
        if theirs and tokens and any(label in keys[value] and value not in theirs for value in batched):
            passed, classes = contraction_dims(op)[1], axes.classes[op.inputs[0]]
            by_example = any(lhs >= 0 and rhs >= 0 and classes[lhs] in batch for lhs, rhs, _ in passed)
            for value in (*tokens, *theirs):
                counts[0 if value in tokens else 1 if by_example else 2] += math.prod(graph.shape(value))
    weights = {_key(axes.classes[value], traced) for value in graph.body.inputs if axes.origins[value] == Origin.PARAM}
    has_experts = any(label in key for key in weights - scoring)
    return Routing(has_experts, frozenset(scoring), frozenset(inside - scoring), *counts)


def _own_dims(op: "Op", weight: int, labels: Labels) -> tuple[list[int | None], list[int | None]]:
    """The classes of the dims of a weight that a product has of it alone, and of those that it sums over.

    Counted by dim: experts from an axis to itself (a residual stream) have its class twice, and are no scores.
    """
    summed, passed = contraction_dims(op)
    side = 0 if op.inputs[0] == weight else 1
    free = [dims[side] for dims in passed if dims[1 - side] < 0]
    return [labels[dim] for dim in free], [labels[dims[side]] for dims in summed]


def _key(labels: Labels, traced: "Traced") -> Key:
    return label_key([label for label in labels if label not in traced.layer_labels])
