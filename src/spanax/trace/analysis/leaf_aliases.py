"""Finds the values of a step that correspond to one leaf: casts, transposes, its gradient and its update."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spanax.trace.analysis.fusion import FUSED
from spanax.trace.jaxpr.dim_maps.relations import Family

if TYPE_CHECKING:
    from spanax.trace.traced import Traced

PASSING = FUSED | {Family.DYNAMIC_SLICE, Family.DYNAMIC_UPDATE}
"""Operations whose result is an alias of an operand with the same classes: no dim was reduced."""


def leaf_aliases(traced: "Traced", leaf: int) -> frozenset[int]:
    """Returns the values of a traced function that are aliases of a leaf of the state, by index.

    Two values are aliases if one is computed from the other elementwise or by data movement, and both have the same
    classes, none of them the batch. In the body of a scan over layers, the alias is one layer of its operand.

    Args:
      traced: the train step.
      leaf: index of the leaf in the state.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> aliases = leaf_aliases(program.step, [leaf.path for leaf in program.leaves].index("kernel"))
      >>> sorted({program.step.graph.shape(value) for value in aliases})  # and its transpose
      [(16, 32), (32, 16)]
    """
    start = traced.graph.body.inputs[leaf]
    aliases, stack = {start}, [start]
    while stack:
        new = [value for value in traced.next_versions.get(stack.pop(), ()) if value not in aliases]
        aliases.update(new)
        stack += new
    return frozenset(aliases)


def updated_aliases(traced: "Traced") -> dict[int, list[int]]:
    """Returns, for every value, its aliases that are one operation away, as operand or as result."""
    neighbors: dict[int, list[int]] = {}
    for source, result in _pairs(traced):
        key = _key(traced, source)
        if key and key == _key(traced, result):
            neighbors.setdefault(source, []).append(result)
            neighbors.setdefault(result, []).append(source)
    return neighbors


def _pairs(traced: "Traced") -> Iterator[tuple[int, int]]:
    for op in traced.graph.ops():
        if op.bodies:
            wires = traced.graph.wires(op)
            yield from (*wires.inputs, *wires.outputs, *wires.carried)
        elif op.family in PASSING:
            yield from ((value, result) for value in op.inputs for result in op.outputs)


def _key(traced: "Traced", value: int) -> tuple[int, ...]:
    labels = [label for label in traced.axes.classes[value] if label is not None]
    if not traced.batch_labels.isdisjoint(labels):
        return ()
    return tuple(sorted(label for label in labels if label not in traced.layer_labels))
