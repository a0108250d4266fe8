"""Matmuls with one contracting dim, which are fast on CPUs."""

from collections.abc import Sequence
from typing import Any

from jax import lax

from spanax.plan.sharding.resolve import Constraint
from spanax.trace.jaxpr.graph import Op


def single_contraction(
    op: Op, ins: Sequence[Any], constraints: Sequence[Constraint | None], manual: frozenset[str] = frozenset()
) -> list[Any] | None:
    """Computes a matmul with its adjacent contracting dims merged into one, which XLA's CPU compiler runs faster.

    The gradient of a weight contracts batch and positions. For two contracting dims the CPU compiler transposes and
    copies an operand, and recomputes its producers for the copy (`CPU_TRANSPOSES` in `plan/sharding/xla_workarounds`);
    for one, it reads the operand in place.

    Returns None unless they are adjacent and only the first is sharded: the spec of a merged dim cannot express an
    inner dim that is sharded, so XLA would gather the operand.
    """
    summed, (batch, _) = op.params["dimension_numbers"]
    if batch or len(summed[0]) < 2 or not all(map(_is_adjacent, summed)):
        return None
    for dims, constraint in zip(summed, constraints, strict=True):
        if constraint is None or constraint.is_open or any(set(constraint.spec[dim]) - manual for dim in dims[1:]):
            return None
    merged = [lax.collapse(array, dims[0], dims[-1] + 1) for array, dims in zip(ins, summed, strict=True)]
    numbers = (tuple((dims[0],) for dims in summed), ((), ()))
    return op.bind(merged, op.params | {"dimension_numbers": numbers})


def _is_adjacent(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))
