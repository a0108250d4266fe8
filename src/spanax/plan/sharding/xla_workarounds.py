"""Keeps XLA from partitioning operations that read or write a slice of a sharded dim.

XLA computes wrong numbers for some of them and fails to compile others; see
tests/run/step/test_parts_of_sharded_dims.py.
"""

from collections.abc import Collection, Sequence

from spanax.plan.sharding.resolve import Constraint
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import Graph, Op

RESIZES = frozenset({Family.RESIZE, Family.DYNAMIC_SLICE})
"""Operations that resize dims of their operands."""

SCATTERS = frozenset({Family.SCATTER, Family.SCATTER_ADD})
"""Operations that write elements of their first operand at indices."""

Placed = tuple[tuple[Constraint | None, ...], tuple[Constraint | None, ...]]


def resized(graph: Graph, op: Op, placed: Sequence[Constraint | None]) -> Placed | None:
    """Returns the constraints of the operands and results of an operation that resizes a dim; None for all else.

    An operand is replicated along a resized dim unless all operands and results are sharded equally along it: 7 of 8
    elements do not divide. By default, XLA shards them unevenly, and its partitioner then computes wrong numbers or
    fails (jaxlib 0.10.2 and 0.12.0.1).

    Args:
      graph: the program.
      op: an operation.
      placed: the constraints of its operands, then those of its results.
    """
    if op.family not in RESIZES:
        return None
    num_operands = len(op.inputs)
    rank = len(graph.shape(op.outputs[0]))  # operands of another rank are the padding value or start indices
    arrays = [index for index, value in enumerate((*op.inputs, *op.outputs)) if len(graph.shape(value)) == rank]
    shapes = [graph.shape((*op.inputs, *op.outputs)[index]) for index in arrays]
    closed = [placed[index] or Constraint(((),) * len(shape)) for index, shape in zip(arrays, shapes, strict=True)]
    dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    dims = [dim for dim in dims if len({constraint.spec[dim] for constraint in closed}) > 1]
    if not dims:
        return None
    constraints: list[Constraint | None] = [None] * len(placed)
    for index, constraint in zip(arrays, closed, strict=True):
        constraints[index] = _replicated(constraint, dims if index < num_operands else ())
    return tuple(constraints[:num_operands]), tuple(constraints[num_operands:])


def writes_shards(op: Op, operand: Constraint | None) -> bool:
    """Returns whether a scatter writes along a sharded dim of its operand.

    Each device scatters into its own shard; indices into other shards are out of bounds there. Where the shard is a
    slice of an operand that was computed replicated, XLA's simplifier reads the replicated form at these indices, and
    the scatter writes that into the shard (jaxlib 0.10.2). An optimization barrier keeps the two apart.
    """
    dims = op.params["dimension_numbers"].scatter_dims_to_operand_dims
    return operand is not None and any(operand.spec[dim] for dim in dims)


def _replicated(constraint: Constraint, dims: Collection[int]) -> Constraint:
    return Constraint(tuple(() if dim in dims else axes for dim, axes in enumerate(constraint.spec)))
