"""Constraints of the plan as shardings of JAX."""

import functools
import math
from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spanax.plan.sharding.resolve import Constraint


class ConstraintError(AssertionError):
    """A sharding constraint does not fit its value: an internal error of Spanax."""


@functools.lru_cache(maxsize=4096)
def check_fits(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    """Raises ConstraintError if a spec has another rank than a shape or does not divide it, which JAX would ignore."""
    sharded = [() if by in (None, PartitionSpec.UNCONSTRAINED) else by for by in spec]
    axes = [by if isinstance(by, tuple) else (by,) for by in sharded]
    num_shards = [math.prod(mesh.shape[axis] for axis in by) for by in axes]
    if len(num_shards) != len(shape) or any(size % parts for size, parts in zip(shape, num_shards, strict=True)):
        raise ConstraintError(f"sharding constraint {spec} does not fit shape {shape} on mesh {dict(mesh.shape)}.")


@functools.lru_cache(maxsize=4096)
def sharding_of(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Returns a sharding; equal ones are one object."""
    return NamedSharding(mesh, spec)


def partition_spec(
    constraint: Constraint, manual: frozenset[str] = frozenset(), leading: Sequence[str | tuple[str, ...] | None] = ()
) -> PartitionSpec:
    """Returns the spec of a constraint without its manual axes, after those of `leading` dims."""
    unsharded = PartitionSpec.UNCONSTRAINED if constraint.is_open else None
    spec = [tuple(axis for axis in axes if axis not in manual) for axes in constraint.spec]
    by_dim = [axes[0] if len(axes) == 1 else axes or unsharded for axes in spec]
    return PartitionSpec(*leading, *by_dim)
