"""The mesh of a plan on devices, and the shardings of its arrays."""

from collections.abc import Sequence
from typing import Any

import jax

from spanax.errors import PlanMismatchError
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement
from spanax.processes.processes import join_group
from spanax.step.compiler_options import check_accepted
from spanax.trace.variables import Leaf


def build_mesh(plan: Plan, devices: Sequence[Any] | None) -> jax.sharding.Mesh:
    """Returns the mesh of a plan, after joining the group of this process and checking the plan's XLA options.

    Raises:
      HostsError: the group cannot be joined.
      SpanaxError: there are too few devices, or the compiler rejects an option.
    """
    join_group()
    mesh = plan.mesh.build(devices)
    check_accepted(plan, mesh)
    return mesh


def assert_placed(plan: Plan, state: Sequence[jax.Array], mesh: jax.sharding.Mesh) -> None:
    """Checks that arrays have the shardings of a plan.

    Raises:
      SpanaxError: an array has another sharding.
    """
    for placement, array in zip(plan.leaves, state, strict=True):
        if not array.sharding.is_equivalent_to(placement.sharding(mesh), len(placement.shape)):
            raise PlanMismatchError(
                f"`{placement.path}` is not sharded as planned.",
                where=f"planned {placement.partition_spec}, actual {array.sharding}",
            )


def abstract_arrays(
    leaves: Sequence[Leaf], placements: Sequence[Placement], mesh: jax.sharding.Mesh
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and planned shardings of arrays."""
    pairs = zip(leaves, placements, strict=True)
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place.sharding(mesh)) for leaf, place in pairs]
