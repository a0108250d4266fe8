"""Matmuls: a product summed over neighbouring dims is handed to XLA's CPU compiler as a sum over one.

A weight's gradient sums over batch and positions. Given two dims, that compiler writes an operand out anew, transposed,
and what computes it is computed again for that (`CPU_TRANSPOSES` in `plan/sharding/xla_workarounds`); given one, it
reads the operand as it lies.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax

from spanax.plan.sharding.resolve import Constraint
from spanax.trace.jaxpr.graph import Op


def as_one_sum(
    op: Op, ins: Sequence[Any], constraints: Sequence[Constraint | None], manual: frozenset[str] = frozenset()
) -> list[Any] | None:
    """The product with its summed dims as one; None where they do not lie side by side, or one but the first is split.

    A split dim within others cannot be told in the spec of them all, and would be gathered.
    """
    summed, (batch, _) = op.params["dimension_numbers"]
    if batch or len(summed[0]) < 2 or not all(map(_side_by_side, summed)):
        return None
    for dims, constraint in zip(summed, constraints, strict=True):
        if constraint is None or constraint.is_open or any(set(constraint.spec[dim]) - manual for dim in dims[1:]):
            return None
    merged = [lax.collapse(array, dims[0], dims[-1] + 1) for array, dims in zip(ins, summed, strict=True)]
    numbers = (tuple((dims[0],) for dims in summed), ((), ()))
    return op.bind(merged, op.params | {"dimension_numbers": numbers})


def _side_by_side(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))
