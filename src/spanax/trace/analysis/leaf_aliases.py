"""Finds the values of a step that correspond to one leaf: casts, transposes, its gradient and its update."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from spanax.trace.analysis.fusion import FUSED
from spanax.trace.analysis.labels import Key, label_key
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import Graph
from spanax.trace.traced import Traced

PASSING = FUSED | {Family.DYNAMIC_SLICE, Family.DYNAMIC_UPDATE}
"""Operations whose result is an alias of an operand with the same classes: no dim was reduced."""


def reachable(start: int, pairs: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Returns the values that are aliases of a value, itself included, from pairs of direct aliases."""
    aliases = {start}
    stack = [start]
    while stack:
        new = [value for value in pairs.get(stack.pop(), ()) if value not in aliases]
        aliases.update(new)
        stack += new
    return frozenset(aliases)


def alias_pairs(traced: Traced, batch: Collection[int | None], layers: Collection[int | None]) -> dict[int, list[int]]:
    """Returns, for every value, its aliases that are one operation away, as operand or as result.

    Args:
      traced: the train step.
      batch: the classes of batch dims; no value with one is an alias.
      layers: the classes of dims along which layers are stacked; aliases may differ by one.
    """

    def key(value: int) -> Key:
        labels = traced.axes.classes[value]
        is_batched = any(label in batch for label in labels)
        return () if is_batched else label_key([label for label in labels if label not in layers])

    neighbors: dict[int, list[int]] = {}
    for source, result in _pairs(traced.graph):
        if (source_key := key(source)) and source_key == key(result):
            neighbors.setdefault(source, []).append(result)
            neighbors.setdefault(result, []).append(source)
    return neighbors


def _pairs(graph: Graph) -> Iterator[tuple[int, int]]:
    for op in graph.ops():
        if op.bodies:
            wires = graph.wires(op)
            yield from (*wires.inputs, *wires.outputs, *wires.carried)
        elif op.family in PASSING:
            yield from ((value, result) for value in op.inputs for result in op.outputs)
