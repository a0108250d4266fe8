"""Placement: the mesh of a plan, arrays with its shardings, and the check that they have them."""

from collections.abc import Sequence
from typing import Any

import jax

from spanax.errors import SpanaxError
from spanax.plan.plan import Placement, Plan
from spanax.run.compiler_options import check_accepted
from spanax.run.distributed.processes import join_group
from spanax.trace.variables import Leaf


def build_mesh(plan: Plan, devices: Sequence[Any] | None) -> jax.sharding.Mesh:
    """Returns the mesh of a plan, after joining the group of this process and trying the plan's options for XLA.

    Raises:
      HostsError: the group cannot be joined.
      SpanaxError: there are too few devices, or the compiler does not know an option.
    """
    join_group()
    mesh = plan.mesh.build(devices)
    check_accepted(plan, mesh)
    return mesh


def assert_placed(plan: Plan, state: Sequence[jax.Array], mesh: jax.sharding.Mesh) -> None:
    """Check the shardings of arrays against a plan.

    Raises:
      SpanaxError: an array lies elsewhere than planned.
    """
    for placement, array in zip(plan.leaves, state, strict=True):
        if not array.sharding.is_equivalent_to(placement.sharding(mesh), len(placement.shape)):
            raise SpanaxError(
                f"`{placement.path}` is not where the plan puts it.",
                where=f"planned {placement.partition_spec}, found {array.sharding}",
            )


def abstract_arrays(
    leaves: Sequence[Leaf], placements: Sequence[Placement], mesh: jax.sharding.Mesh
) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of arrays with their planned shardings."""
    pairs = zip(leaves, placements, strict=True)
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place.sharding(mesh)) for leaf, place in pairs]
