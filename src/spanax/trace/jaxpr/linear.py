"""The operands in which each primitive is linear, and the values of a graph that are zero for all inputs."""

from collections.abc import Collection, Sequence

import jax
import numpy as np

from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.provenance import propagated

LINEAR = frozenset(
    """
add add_any broadcast_in_dim concatenate convert_element_type copy copy_p expand_dims neg reduce_sum reshape rev
sharding_constraint slice squeeze sub transpose
""".split()
)
"""Operations that are linear in all of their operands jointly."""

LINEAR_IN = {
    "cumsum": (0,),
    "div": (0,),
    "dot_general": (0, 1),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "mul": (0, 1),
    "pad": (0, 1),
    "select_n": (1, 2),
}
"""Operations that are linear in some of their operands, by operand position; `PRODUCTS` in either one."""

PRODUCTS = frozenset({"mul", "dot_general"})


def linear_operands(op: Op) -> Collection[int]:
    """Returns the positions of the operands in which an operation is linear."""
    return range(len(op.inputs)) if op.name in LINEAR else LINEAR_IN.get(op.name, ())


def is_linear(ops: Sequence[Op], after: Collection[int], result: int) -> bool:
    """Whether operations compute a value linearly from the values `after`: its derivatives in them are constant."""
    live = {result}
    for op in ops[::-1]:
        if live.isdisjoint(op.outputs):
            continue
        dependent = [index for index, value in enumerate(op.inputs) if value in after]
        if not set(dependent) <= set(linear_operands(op)) or (op.name in PRODUCTS and len(dependent) > 1):
            return False
        live.update(op.inputs)
    return True


MOST_ELEMENTS = 1 << 16
"""Larger constants are not inspected, and count as nonzero."""

ZERO_AT_ZERO = frozenset(
    """
abs device_put imag integer_pow optimization_barrier psum real reduce_max reduce_min reduce_precision round scatter-add
scatter_add sign split sqrt square tan tanh
""".split()
)
"""Nonlinear operations, and those of several results, that return zeros if all operands are zeros."""

ZERO_OF_FIRST = frozenset({"gather", "sort"})
"""Operations that return zeros if the first operand is zeros."""

ZERO_OF_ANY = PRODUCTS | {"conv_general_dilated", "ragged_dot_general"}
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
    seeds = dict.fromkeys(graph.body.inputs, 1)
    seeds |= {value: int(not _is_zero(constant)) for value, constant in graph.constants.items()}
    is_nonzero = propagated(graph, seeds, _is_nonzero)
    return frozenset(value for value, nonzero in enumerate(is_nonzero) if not nonzero)


def _is_zero(constant: object) -> bool:
    size = getattr(constant, "size", 1)
    if isinstance(constant, bool) or not isinstance(size, int) or size > MOST_ELEMENTS:
        return False
    if not hasattr(constant, "dtype"):
        return isinstance(constant, int | float) and constant == 0
    return bool(jax.dtypes.issubdtype(constant.dtype, np.number)) and not np.asarray(constant).any()


def _is_nonzero(op: Op, operands: list[int]) -> int:
    """Returns 0 if an operation returns zeros, given which of its operands are nonzero, and otherwise 1."""
    if op.name == "select_n":
        return int(any(operands[1:]))
    if op.name in ZERO_OF_ANY:
        return int(all(operands[:2]))
    positions = linear_operands(op)
    if op.name in ZERO_AT_ZERO:
        positions = range(len(operands))
    elif op.name in ZERO_OF_FIRST:
        positions = (0,)
    return int(not positions or any(operands[position] for position in positions))
