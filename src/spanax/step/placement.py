"""The mesh of a plan on devices: its platform and compiler options, and the placement of the state and of batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from spanax.errors import BatchError, FormatError, PlanMismatchError
from spanax.hardware.cluster import local
from spanax.hardware.flags import default_flags, flags_of, for_platform
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import DEVICE, HOST, Placement
from spanax.processes.processes import join_group
from spanax.trace.program import Program
from spanax.trace.user_mesh import is_typed
from spanax.trace.variables import Leaf


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Returns `cpu`, `tpu` or `gpu`, as JAX names it; empty for an abstract mesh without an abstract device."""
    if isinstance(mesh, AbstractMesh):
        return "" if mesh.abstract_device is None else str(mesh.abstract_device.platform)
    return str(mesh.devices.flat[0].platform)


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
    return [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place.sharding(mesh), weak_type=leaf.weak_type)
        for leaf, place in pairs
    ]


def flagged(plan: Plan, requested: str | None, devices: Sequence[Any]) -> Plan:
    """Returns the plan with the XLA options of --xla-flags; the plan itself if the flag is not set.

    Raises:
      SpanaxError: an option cannot be parsed.
    """
    if requested is None:
        return plan
    default = default_flags(local(devices[: plan.mesh.size]), plan.param_axes)
    return replace(plan, xla_flags=flags_of(requested, default))


def check_accepted(plan: Plan, mesh: jax.sharding.Mesh) -> None:
    """Checks that the compiler for these devices accepts the XLA options of a plan.

    Raises:
      SpanaxError: an option is unknown to it, or has an unknown value.
    """
    options = for_platform(plan.xla_flags, platform_of(mesh))
    if not options:
        return
    try:
        jax.jit(lambda x: x + 1, compiler_options=options).lower(jax.ShapeDtypeStruct((), "int32")).compile()
    except jax.errors.JaxRuntimeError as error:
        raise FormatError(
            f"XLA rejects an option: {str(error).splitlines()[0].partition(': ')[2][:200]}",
            where=", ".join(plan.xla_flags)[:200],
            fix="--xla-flags none, or options of this version of XLA",
        ) from None


def to_device(arrays: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Returns traced arrays with those in host memory copied to the devices, under the same sharding."""
    return [
        jax.device_put(array, sharding.with_memory_kind(DEVICE)) if sharding.memory_kind == HOST else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def to_host(arrays: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Returns traced arrays with those that are stored in host memory copied there."""
    return [
        jax.device_put(array, sharding) if sharding.memory_kind == HOST else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def validate_batch(program: Program, shardings: Sequence[jax.sharding.NamedSharding], batch: Any) -> list[Any]:
    """Returns the arrays of a batch in the program's order, with the given shardings.

    Raises:
      SpanaxError: the structure, a shape or a dtype differs from the batch that the program was traced with.
    """
    leaves, treedef = jax.tree.flatten(batch)
    leaves = [array if hasattr(array, "shape") else np.asarray(array) for array in leaves]
    if treedef != program.batch_treedef:
        raise BatchError(
            "the structure of the batch differs from the traced batch.",
            where=f"expected {program.batch_treedef}, got {treedef}",
        )
    for leaf, array in zip(program.batch, leaves, strict=True):
        if tuple(array.shape) != leaf.shape:
            raise BatchError(
                f"batch leaf '{leaf.path}' has shape {tuple(array.shape)}, but was traced with {leaf.shape}.",
                fix="trace the program with a batch of this shape, or drop the incomplete batch",
            )
        if array.dtype != leaf.dtype and jax.dtypes.canonicalize_dtype(array.dtype) != leaf.dtype:
            raise BatchError(
                f"batch leaf '{leaf.path}' is {array.dtype}, but was traced as {leaf.dtype}.",
                fix=f"batch['{leaf.path}'].astype('{leaf.dtype}')",
            )
    return [place_argument(array, sharding) for array, sharding in zip(leaves, shardings, strict=True)]


def place_argument(array: Any, sharding: jax.sharding.NamedSharding) -> Any:
    """Returns the array with the planned sharding; an array on the host is transferred with the step."""
    if not isinstance(array, jax.Array) or array.sharding == sharding:
        return array
    is_placed = array.sharding.is_equivalent_to(sharding, array.ndim) and not is_typed(array)
    return array if is_placed else jax.device_put(array, sharding)
