"""Groups the classes of dims by their role in a step: batch, layers, experts, indexed dims, attention scores."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from spanax.trace.axes.axes import Axes
from spanax.trace.axes.example_dims import consumed_dims, contraction_size, runs_of, scanned_dims
from spanax.trace.jaxpr.dim_maps.relations import Family, Kind
from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph, Op
from spanax.trace.jaxpr.provenance import Origin

Labels = tuple[int | None, ...]
"""The class of each dim of a value; None for a dim of size 1."""

Key = tuple[int, ...]
"""The classes of a value in sorted order, without None."""


LEAST_SHARE = 0.05
"""The share of the work that a class divides without dividing a matmul, as in a loss."""

PASSING = frozenset({Family.ELEMENTWISE, Family.VIEW, Family.REORDER, Family.REDUCTION, Family.FRESH})
"""Operations that compute each element of the dims that they pass on alone."""


Sizes = dict[int, tuple[Labels, int]]
"""Values, with their labels and bytes."""


@dataclass(frozen=True)
class HiddenWeight:
    """A weight of a hidden class and its gradients, and the activations of their matmuls, with that class or without.

    Weights with the same classes are one.
    """

    weights: Sizes = field(default_factory=dict)
    inside: Sizes = field(default_factory=dict)
    outside: Sizes = field(default_factory=dict)


def label_key(labels: Sequence[int | None]) -> Key:
    """Returns the labels of a value in sorted order, without None."""
    return tuple(sorted(label for label in labels if label is not None))


def labels_by_name(graph: Graph, axes: Axes) -> dict[str, list[int]]:
    """Returns classes by name and by use, in the order in which contractions compute with them."""
    order: dict[int, None] = {}
    for op in graph.ops():
        if op.name in CONTRACTIONS:
            order |= {label: None for label in axes.classes[op.outputs[0]] if label is not None}
    order |= {label: None for label in sorted(axes.names)}
    by_name: dict[str, list[int]] = {}
    for label in order:
        for names in (axes.names, axes.uses):
            if label in names:
                by_name.setdefault(names[label], []).append(label)
    return by_name


def worked_labels(graph: Graph, axes: Axes, routed: Collection[Labels]) -> frozenset[int]:
    """Returns the classes of dims of weights and activations that divide work or storage.

    Experts in a Python loop have a router whose scores are a separate class: sharding that class would partition
    neither the weights of the experts nor their compute. A class that a loop takes one by one, and that no weight, no
    matmul, and less than `LEAST_SHARE` of the work have, divides none: steps, or examples that it computes in turn.
    """
    worked = {label for labels in axes.classes if labels not in routed for label in labels if label is not None}
    multiplied = set[int | None]()
    work = Counter[int | None]()
    total = 0
    for op, runs in runs_of(graph.body, 1):
        labels = {label for value in (*op.inputs, *op.outputs) for label in axes.classes[value]}
        size = 0 if op.bodies else runs * sum(math.prod(graph.shape(value)) for value in op.outputs)
        if op.name in CONTRACTIONS:
            size = runs * contraction_size(graph, op)
            multiplied |= labels
        for label in labels:
            work[label] += size
        total += size
    if not multiplied:
        return frozenset(worked)
    state = [value for value in graph.body.inputs if not axes.origins[value] & Origin.BATCH]
    stored = {label for value in state for label in axes.classes[value]}
    looped = {axes.classes[value][dim] for value, dim in (*scanned_dims(graph), *consumed_dims(graph))}
    idle = {label for label in looped - stored - multiplied if work[label] <= LEAST_SHARE * total}
    return frozenset(worked - idle)


def looked_up_labels(graph: Graph, axes: Axes) -> frozenset[int | None]:
    """Returns the classes along which tables are indexed; if sharded along others, lookups are local."""
    return frozenset(
        axes.classes[op.inputs[0]][dim]
        for op in graph.ops()
        if op.family is Family.GATHER and not axes.origins[op.inputs[0]] & Origin.BATCH
        for dim in op.indexed
    )


def score_labels(axes: Axes, score_keys: Collection[Key], layers: Collection[int | None]) -> frozenset[Labels]:
    """Returns the labels of attention scores, also with stacked layers."""
    keys = {labels: label_key([label for label in labels if label not in layers]) for labels in set(axes.classes)}
    return frozenset(labels for labels, key in keys.items() if key in score_keys)


def stacked_labels(axes: Axes, labels: Collection[Labels], layers: Collection[int | None]) -> frozenset[Labels]:
    """Returns the labels that equal one of the given labels, in the same order, but for stacked layers."""
    return frozenset(each for each in axes.classes if tuple(label for label in each if label not in layers) in labels)


def hidden_weights(graph: Graph, axes: Axes, batch: frozenset[int | None]) -> dict[int, list[HiddenWeight]]:
    """Returns the weights of each hidden class: its activations are those between matmuls, computed element by element.

    Arguments and results of the function have none of these classes.
    """
    classes = axes.classes
    result: dict[int, dict[Key, HiddenWeight]] = {}
    known = (classes[value] for value in (*graph.body.inputs, *graph.body.outputs))
    others = {label for labels in known if not batch.isdisjoint(labels) for label in labels}
    stored = {label_key(classes[value]) for value in graph.body.inputs}
    for value, labels in enumerate(classes):  # activations of no example, such as tokens in the slots of experts
        if axes.origins[value] & Origin.BATCH and batch.isdisjoint(labels) and label_key(labels) not in stored:
            others.update(labels)
    for op in graph.ops():
        if op.bodies:
            wires = graph.wires(op)
            for outer, inner in (*wires.inputs, *wires.outputs):
                others.update(classes[outer][: len(classes[outer]) - len(classes[inner])])
            continue
        values = (*op.inputs, *op.outputs)
        weights = [value for value in values if batch.isdisjoint(classes[value])]
        if len(weights) == len(values):
            continue
        if op.name != "dot_general" or len(weights) != 1:
            others |= _not_passed(op, classes, batch)
            continue
        (weight,) = weights
        activations = [value for value in values if value != weight]
        own = [label for label in classes[weight] if label is not None]
        others.update(label for value in activations for label in classes[value] if label not in own)
        for label in own:
            having = [value for value in activations if label in classes[value]]
            if own.count(label) == len(having) == 1 and len(activations) == 2:
                outside = activations[1 - activations.index(having[0])]
                found = result.setdefault(label, {}).setdefault(label_key(own), HiddenWeight())
                for sizes, value in ((found.weights, weight), (found.inside, having[0]), (found.outside, outside)):
                    sizes[value] = classes[value], graph.num_bytes(value)
            else:
                others.add(label)
    return {label: [*weights.values()] for label, weights in result.items() if label not in others}


def _not_passed(op: Op, classes: Sequence[Labels], batch: frozenset[int | None]) -> set[int | None]:
    """Returns the classes of an operation's dims that it does not compute element by element.

    A sum over the batch is one over devices anyway.
    """
    if op.family not in PASSING:
        return {label for value in (*op.inputs, *op.outputs) for label in classes[value]}
    if op.family is Family.REDUCTION and batch.isdisjoint(classes[op.outputs[0]]):
        return set()
    passed = op.dim_map.dims(Kind.SAME)
    dims = ((array, dim) for array, value in enumerate(op.inputs) for dim in range(len(classes[value])))
    return {classes[op.inputs[array]][dim] for array, dim in dims if (array, dim) not in passed}


def moves_less(weights: Sequence[HiddenWeight], ways: Callable[[Labels], int], num_shards: int, times: int) -> bool:
    """Returns whether sharding a hidden class instead of the batch moves less.

    Otherwise the lesser of a weight and of both its activations moves. `times` is how many times as large as
    activations a weight must be.
    """

    def local(sizes: Sizes) -> float:
        return sum(size / ways(labels) for labels, size in sizes.values())

    moved = sum(times * local(weight.outside) for weight in weights)
    exchanged = [times * (local(weight.outside) + local(weight.inside) / num_shards) for weight in weights]
    return moved <= sum(min(other, local(each.weights)) for other, each in zip(exchanged, weights, strict=True))
