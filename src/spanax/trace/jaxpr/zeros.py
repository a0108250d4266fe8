"""Values of a graph that are zero for all inputs, such as the gradient of `stop_gradient`."""

from collections.abc import Sequence

import jax
import numpy as np

from spanax.trace.jaxpr.graph import Body, Graph, Op

MOST_ELEMENTS = 1 << 16
"""Larger constants are not searched for a number other than zero."""

ZERO_OF_ZEROS = frozenset(
    """
abs add add_any broadcast_in_dim concatenate convert_element_type copy copy_p cumsum device_put expand_dims integer_pow
neg optimization_barrier pad psum real imag reduce_max reduce_min reduce_precision reduce_sum reshape rev round
scatter-add scatter_add sharding_constraint sign slice split sqrt square squeeze sub tan tanh transpose
""".split()
)
"""Operations that return zeros where all operands are zeros."""

ZERO_OF_FIRST = frozenset({"div", "dynamic_slice", "gather", "sort"})
"""Operations that return zeros where the first operand is zeros."""

ZERO_OF_ANY = frozenset({"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Operations that return zeros where one of two operands is zeros."""


def zeros(graph: Graph) -> frozenset[int]:
    """The values that are zero for every finite input, by number.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: (x * 0.0 + 0.0, x + 0.0))(1.0))
      >>> [value in zeros(graph) for value in graph.body.outputs]
      [True, False]
    """
    found = {value for value, constant in graph.constants.items() if _is_zero(constant)}
    _follow(graph, graph.body, found)
    return frozenset(found)


def _is_zero(constant: object) -> bool:
    size = getattr(constant, "size", 1)
    if isinstance(constant, bool) or not isinstance(size, int) or size > MOST_ELEMENTS:
        return False
    if not hasattr(constant, "dtype"):
        return isinstance(constant, int | float) and constant == 0
    return bool(jax.dtypes.issubdtype(constant.dtype, np.number)) and not np.asarray(constant).any()


def _follow(graph: Graph, body: Body, found: set[int]) -> None:
    for op in body.ops:
        if op.bodies:
            _follow_bodies(graph, op, found)
        elif _returns_zeros(op, [value in found for value in op.inputs]):
            found.update(op.outputs)
        else:
            found.difference_update(op.outputs)


def _returns_zeros(op: Op, are_zeros: Sequence[bool]) -> bool:
    if op.name == "select_n":
        return all(are_zeros[1:])
    if op.name in ZERO_OF_FIRST:
        return are_zeros[0]
    if op.name in ZERO_OF_ANY:
        return any(are_zeros[:2])
    return op.name in ZERO_OF_ZEROS and bool(are_zeros) and all(are_zeros)


def _follow_bodies(graph: Graph, op: Op, found: set[int]) -> None:
    wires = graph.wires(op)
    # Optimistic: a carry counts as zeros until an iteration returns something else for it.
    found.update(inner for _, inner in wires.inputs)
    found.difference_update(inner for outer, inner in wires.inputs if outer not in found)
    while True:
        for inner_body in op.bodies:
            _follow(graph, inner_body, found)
        others = [first for first, last in wires.carried if first in found and last not in found]
        if not others:
            break
        found.difference_update(others)
    found.update(outer for outer, _ in wires.outputs)
    found.difference_update(outer for outer, inner in wires.outputs if inner not in found)
