"""The operands in which each primitive is linear."""

from collections.abc import Collection

from spanax.trace.jaxpr.graph import Op

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
