"""The mesh and layout that functions of the same objects share."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from spanax.errors import (
    IdleAxisError,
    IndivisibleError,
    MeshError,
    ObjectsError,
    PipelineError,
    VariantError,
    first_line,
)
from spanax.hardware.cluster import Cluster, cluster_of, local
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidates.request import Request
from spanax.plan.choose import decided
from spanax.plan.layout import Layout
from spanax.plan.plan import Plan
from spanax.plan.presets import layout_for, layout_named
from spanax.plan.sharding.place import check_made_for
from spanax.run.distributed.processes import join_group
from spanax.run.state.placement import build_mesh
from spanax.run.state.sharded_init import placed
from spanax.trace.program import Program
from spanax.trace.user_mesh import is_explicit, is_typed, sharding_on, user_mesh
from spanax.trace.variant import Variant


@dataclass(frozen=True)
class LossOptions:
    """The form of the losses of one function.

    Attributes:
      variant: their remat policy and microbatches.
      attention: as in `spanax.plan`.
      loss_chunks: as in `spanax.plan`.
    """

    variant: Variant = Variant()
    attention: str | None = None
    loss_chunks: int | str | None = None


@dataclass(eq=False)
class SharedPlacement:
    """The mesh and layout that functions share; the first of them to be planned decides both.

    Attributes:
      request: the requirements of the plan.
      on: the devices to plan for; those of this process group by default.
      plan: the plan of the first function.
      mesh: the devices.
      user_mesh: the user's Explicit mesh of the same devices, if any; see `CompiledFunction`.
    """

    request: Request
    on: Cluster | str | None = None
    plan: Plan | None = None
    mesh: jax.sharding.Mesh | None = None
    user_mesh: jax.sharding.Mesh | None = None

    def plan_for(self, program: Program, losses: LossOptions, *, is_like: bool, values: Sequence[Any] = ()) -> Plan:
        """Returns the plan of a program, with its losses in a form, on the shared mesh.

        Args:
          program: the program.
          losses: the form of its losses.
          is_like: whether mesh axes that do not divide the batch compute it replicated, as for the last batch of an
            evaluation; otherwise they raise.
          values: the arrays of the call. Without a request for a mesh, an Explicit one that they are on is used.

        Raises:
          SpanaxError: the program cannot be sharded as requested, or there are too few devices.
        """
        users = None if self.mesh is not None else user_mesh(values)
        if self.plan is None and self.on is None:
            self.request = _on_mesh_of(users, self.request)
        if self.plan is None:
            request = replace(self.request, attention=losses.attention, loss_chunks=losses.loss_chunks)
            try:
                plan = decided(program, self.cluster(), request)
            except IdleAxisError as error:
                if not any(isinstance(value, jax.Array) and _num_devices(value) > 1 for value in values):
                    raise
                raise IdleAxisError(  # another mesh would move the arrays
                    first_line(error), axis=error.axis, in_storage=error.in_storage,
                    fix="like=train_step, the function that placed these objects, instead of mesh and layout",
                ) from error  # fmt: skip
        elif self.plan.fingerprint == program.fingerprint:
            check_made_for(program, self.plan)
            plan = self.plan
        else:
            plan = _planned_like(program, self.cluster(), self.plan, losses, is_like=is_like)
        if plan.schedule.num_stages > 1:
            raise PipelineError("a pipeline requires a loss.", fix="spanax.trace(loss=...), or a mesh without 'pipe'")
        if (self.plan or plan).schedule.offload:
            raise VariantError(
                "the plan offloads state to host memory, which only the steps of `spanax.start` support.",
                fix="spanax.start(program, plan), or a plan without offload",
            )
        if self.mesh is None:
            self.mesh = build_mesh(plan, None)
            self.user_mesh = _of_same_devices(users, self.mesh)
        self.plan = self.plan or plan
        return plan

    def cluster(self) -> Cluster:
        """Returns the devices that functions are planned for."""
        if self.on is not None:
            return cluster_of(self.on)
        mesh = self.request.mesh if self.plan is None else self.plan.mesh
        join_group()
        devices = jax.devices()
        if mesh is not None and MeshShape.of(mesh).size <= len(devices):
            devices = devices[: MeshShape.of(mesh).size]
        return local(devices)


def _num_devices(array: jax.Array) -> int:
    return len(array.sharding.device_set)


def _on_mesh_of(mesh: jax.sharding.Mesh | None, request: Request) -> Request:
    """Returns a request without a mesh for the user's, if its layout is one of that mesh."""
    if mesh is None or request.mesh is not None:
        return request
    try:
        shape = MeshShape.of(mesh)
        if request.layout is None:
            layout_for(shape)
        elif isinstance(request.layout, str):
            layout_named(request.layout, shape)
    except MeshError:
        return request
    return replace(request, mesh=shape)


def _of_same_devices(users: jax.sharding.Mesh | None, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh | None:
    """Returns the user's mesh if it is Explicit and has the devices of the plan's."""
    if users is None or not is_explicit(users):
        return None
    return users if [*users.devices.flat] == [*mesh.devices.flat] else None


def _planned_like(program: Program, cluster: Cluster, plan: Plan, losses: LossOptions, *, is_like: bool) -> Plan:
    """Returns the plan of a program on the mesh of another plan; mesh axes may have nothing to shard in it."""
    request = Request(mesh=plan.mesh, attention=losses.attention, loss_chunks=losses.loss_chunks, offload=())
    layout = plan.layout
    known = {*program.step.axes.names.values()}
    pins = {axis: pin for axis, pin in plan.pins if axis in known}
    while True:
        try:
            padded = _padded_in(program, layout, plan)
            return decided(program, cluster, replace(request, layout=layout, pins=pins, pad=padded))
        except IdleAxisError as error:  # such as `data` where a function has no batch: it computes replicated there
            layout = _stored_without(layout, error.axis) if error.in_storage else _without(layout, error.axis)
        except IndivisibleError as error:
            if not is_like or error.axis not in dict(layout.computed):
                raise
            warnings.warn(f"{first_line(error)} It is computed replicated over '{error.axis}'.", stacklevel=7)
            layout = _without(layout, error.axis)


def _padded_in(program: Program, layout: Layout, plan: Plan) -> list[str]:
    """Returns the padded axes of a plan that a program has and a layout shards."""
    names = {*program.step.axes.names.values()}.intersection(name for _, names in layout.computed for name in names)
    return [name for name, _ in plan.schedule.padded if name in names]


def _stored_without(layout: Layout, axis: str) -> Layout:
    stored: dict[str, Any] = {
        name: tuple(other for other in getattr(layout, name) if other != axis)
        for name in ("stored_params", "stored_gradients", "stored_optimizer")
    }
    return replace(layout, **stored)


def _without(layout: Layout, axis: str) -> Layout:
    return replace(layout, computed=tuple(pair for pair in layout.computed if pair[0] != axis))


def state_shardings(plan: Plan, mesh: jax.sharding.Mesh, arrays: Sequence[Any]) -> tuple[jax.sharding.Sharding, ...]:
    """Returns the sharding of every leaf of the state: its own, if it is on the mesh, or else the plan's.

    Raises:
      SpanaxError: an array is sharded over another mesh.
    """
    shardings = []
    for leaf, array in zip(plan.leaves, arrays, strict=True):
        sharding = getattr(array, "sharding", None)
        if isinstance(array, jax.Array) and is_typed(array) and not array.is_fully_replicated:
            sharding = sharding_on(array.sharding, mesh)  # under an Explicit mesh, JAX replicates new arrays unasked
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh and isinstance(array, jax.Array):
            shardings.append(sharding)
        else:
            check_mesh(leaf.path, array, mesh)
            shardings.append(leaf.sharding(mesh))
    return tuple(shardings)


def check_mesh(path: str, array: Any, mesh: jax.sharding.Mesh) -> None:
    """Checks that an array is on one device, on the host, on the mesh, or on an Explicit mesh, which is the user's.

    Raises:
      SpanaxError: it is sharded over another mesh.
    """
    if not isinstance(array, jax.Array) or is_typed(array):
        return
    if len(array.sharding.device_set) > 1 and not _is_on(array.sharding, mesh):
        raise ObjectsError(
            f"`{path}` is already sharded over another mesh.",
            where=f"{array.sharding}; this function's mesh is {dict(mesh.shape)}",
            fix="the same mesh, spanax.jit(like=...), or objects that are created without a mesh",
        )


def place(path: str, array: Any, aval: Any, sharding: jax.sharding.Sharding, mesh: jax.sharding.Mesh) -> jax.Array:
    """Returns an array with a sharding, in buffers of its own unless it already has it.

    Raises:
      SpanaxError: its shape or dtype is not `aval`'s, it has no value, or it is sharded over another mesh.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ObjectsError(f"`{path}` is a shape without a value.", fix="spanax.init, which creates sharded objects")
    array = array if isinstance(array, jax.Array) else jnp.asarray(array)
    if (array.shape, array.dtype) != (aval.shape, aval.dtype):
        raise ObjectsError(
            f"`{path}` is {array.dtype}{list(array.shape)}, but the function was traced with "
            f"{aval.dtype}{list(aval.shape)}.",
            fix="another function of spanax.jit for objects of another structure",
        )
    check_mesh(path, array, mesh)
    is_between_types = is_typed(array) and array.sharding.mesh != sharding.mesh
    if array.sharding.is_equivalent_to(sharding, array.ndim) and not is_between_types:
        return array
    is_on = array.sharding.device_set == sharding.device_set and len(array.sharding.device_set) > 1
    return jax.device_put(array, sharding) if is_on else placed(array, sharding)


def _is_on(sharding: jax.sharding.Sharding, mesh: jax.sharding.Mesh) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh
