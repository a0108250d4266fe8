"""Values of a step that correspond to one leaf: casts, transposes, its gradient and its update."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spanax.trace.analysis.fusion import FUSED, REDUCTIONS
from spanax.trace.analysis.sharding_keys import MOVEMENT

if TYPE_CHECKING:
    from spanax.trace.traced import Traced

PASSING = FUSED | MOVEMENT | REDUCTIONS | {"dynamic_slice", "dynamic_update_slice"}
"""Operations whose result is a version of an operand where both have the same classes: none of them was summed."""


def leaf_aliases(traced: "Traced", leaf: int) -> frozenset[int]:
    """Every value of a traced function that is a version of a leaf of the state, by their numbers.

    Two values are versions of one if one is made of the other number by number, or put elsewhere, and both have the
    same classes; nothing that grows with the batch is one. What goes into a loop over layers is one layer there.

    Args:
      traced: the train step.
      leaf: the leaf's number among those of the state.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> found = leaf_aliases(program.step, [one.path for one in program.leaves].index("kernel"))
      >>> sorted({program.step.graph.shape(value) for value in found})  # one way around, and the other
      [(16, 32), (32, 16)]
    """
    start = traced.graph.body.inputs[leaf]
    found, left = {start}, [start]
    while left:
        new = [value for value in traced.next_versions.get(left.pop(), ()) if value not in found]
        found.update(new)
        left += new
    return frozenset(found)


def updated_aliases(traced: "Traced") -> dict[int, list[int]]:
    """For every value, those that one operation makes of it and that are versions of the same, both ways."""
    found: dict[int, list[int]] = {}
    for one, other in _pairs(traced):
        key = _key(traced, one)
        if key and key == _key(traced, other):
            found.setdefault(one, []).append(other)
            found.setdefault(other, []).append(one)
    return found


def _pairs(traced: "Traced") -> Iterator[tuple[int, int]]:
    for op in traced.graph.ops():
        if op.bodies:
            wires = traced.graph.wires(op)
            yield from (*wires.inputs, *wires.outputs, *wires.carried)
        elif op.name in PASSING:
            yield from ((value, made) for value in op.inputs for made in op.outputs)


def _key(traced: "Traced", value: int) -> tuple[int, ...]:
    labels = [label for label in traced.axes.classes[value] if label is not None]
    if not traced.batch_labels.isdisjoint(labels):
        return ()
    return tuple(sorted(label for label in labels if label not in traced.layer_labels))
