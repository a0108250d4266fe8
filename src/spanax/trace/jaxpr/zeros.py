"""Values of a graph that are zero for all inputs, such as the gradient of `stop_gradient`."""

from collections.abc import Sequence

import jax
import numpy as np

from spanax.trace.jaxpr.graph import Body, Graph, Op

MOST_ELEMENTS = 1 << 16
"""Larger constants are not inspected, and count as nonzero."""

ZERO_OF_ZEROS = frozenset(
    """
abs add add_any broadcast_in_dim concatenate convert_element_type copy copy_p cumsum device_put expand_dims integer_pow
neg optimization_barrier pad psum real imag reduce_max reduce_min reduce_precision reduce_sum reshape rev round
scatter-add scatter_add sharding_constraint sign slice split sqrt square squeeze sub tan tanh transpose
""".split()
)
"""Operations that return zeros if all operands are zeros."""

ZERO_OF_FIRST = frozenset({"div", "dynamic_slice", "gather", "sort"})
"""Operations that return zeros if the first operand is zeros."""

ZERO_OF_ANY = frozenset({"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Operations that return zeros if one of two operands is zeros."""


def zeros(graph: Graph) -> frozenset[int]:
    """Returns the numbers of the values that are zero for every finite input.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: (x * 0.0 + 0.0, x + 0.0))(1.0))
      >>> [value in zeros(graph) for value in graph.body.outputs]
      [True, False]
    """
    zero_values = {value for value, constant in graph.constants.items() if _is_zero(constant)}
    _follow(graph, graph.body, zero_values)
    return frozenset(zero_values)


def _is_zero(constant: object) -> bool:
    size = getattr(constant, "size", 1)
    if isinstance(constant, bool) or not isinstance(size, int) or size > MOST_ELEMENTS:
        return False
    if not hasattr(constant, "dtype"):
        return isinstance(constant, int | float) and constant == 0
    return bool(jax.dtypes.issubdtype(constant.dtype, np.number)) and not np.asarray(constant).any()


def _follow(graph: Graph, body: Body, zero_values: set[int]) -> None:
    for op in body.ops:
        if op.bodies:
            _follow_bodies(graph, op, zero_values)
        elif _returns_zeros(op, [value in zero_values for value in op.inputs]):
            zero_values.update(op.outputs)
        else:
            zero_values.difference_update(op.outputs)


def _returns_zeros(op: Op, are_zeros: Sequence[bool]) -> bool:
    if op.name == "select_n":
        return all(are_zeros[1:])
    if op.name in ZERO_OF_FIRST:
        return are_zeros[0]
    if op.name in ZERO_OF_ANY:
        return any(are_zeros[:2])
    return op.name in ZERO_OF_ZEROS and bool(are_zeros) and all(are_zeros)


def _follow_bodies(graph: Graph, op: Op, zero_values: set[int]) -> None:
    wires = graph.wires(op)
    # Optimistic fixed point: a carry counts as zeros until an iteration returns nonzero values for it.
    zero_values.update(inner for _, inner in wires.inputs)
    zero_values.difference_update(inner for outer, inner in wires.inputs if outer not in zero_values)
    while True:
        for inner_body in op.bodies:
            _follow(graph, inner_body, zero_values)
        nonzero = [first for first, last in wires.carried if first in zero_values and last not in zero_values]
        if not nonzero:
            break
        zero_values.difference_update(nonzero)
    zero_values.update(outer for outer, _ in wires.outputs)
    zero_values.difference_update(outer for outer, inner in wires.outputs if inner not in zero_values)
