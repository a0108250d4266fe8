"""The mesh and layout that functions of the same objects share."""

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from spanax.compat import is_of_python
from spanax.errors import (
    IdleAxisError,
    IndivisibleError,
    MeshError,
    ObjectsError,
    PipelineError,
    VariantError,
    first_line,
)
from spanax.hardware.cluster import Cluster, cluster_of, is_of_kind, local
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidates.request import Request, requested_layout
from spanax.plan.choose import decided
from spanax.plan.layout import Layout
from spanax.plan.place import anchored, check_made_for
from spanax.plan.plan import Plan
from spanax.plan.presets import layout_for, layout_named
from spanax.plan.sharding.resolve import Spec
from spanax.processes.processes import join_group
from spanax.step.donation import check_alive, private_copy
from spanax.step.placement import build_mesh
from spanax.step.sharded_init import placed
from spanax.trace.program import Program
from spanax.trace.user_mesh import is_explicit, is_typed, sharding_on, user_mesh
from spanax.trace.variables import Leaf
from spanax.trace.variant import Variant


class Turns:
    """A lock that one thread at a time has, and may take again, as when one function is called while another is traced.

    A callback of a running program gets an error instead of the lock: its program waits for it, and so may the devices.

    Example:
      >>> turns = Turns()
      >>> with turns, turns:
      ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        # XLA runs callbacks in threads of its own.
        if not self._lock.acquire(blocking=is_of_python()):
            raise ObjectsError(
                "a callback of a running function calls a function of spanax.jit on the same devices.",
                fix="return its arguments from the running function, and call it afterwards",
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Turns":
        return Turns()


@dataclass(frozen=True)
class LossOptions:
    """The options of the losses of one function.

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
      turns: the lock of the functions that share the placement.
      is_requested: whether the plan is the user's, which arrays must follow that are sharded otherwise.
    """

    request: Request
    on: Cluster | str | None = None
    plan: Plan | None = None
    mesh: jax.sharding.Mesh | None = None
    user_mesh: jax.sharding.Mesh | None = None
    turns: Turns = field(default_factory=Turns)
    is_requested: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_requested = self.plan is not None

    def plan_for(
        self,
        program: Program,
        losses: LossOptions,
        arrays: Sequence[Any] = (),
        batch: Sequence[Any] = (),
        *,
        is_like: bool,
    ) -> Plan:
        """Returns the plan of a program, with options of its losses, on the shared mesh.

        Arrays that are on the mesh keep their sharding, and those of the plan of the first function have its sharding.

        Args:
          program: the program.
          losses: the options of its losses.
          arrays: the arrays of its leaves, if there are any yet.
          batch: the other arrays of the call; without a request for a mesh, the one that arrays are on is used.
          is_like: whether mesh axes that do not divide the batch compute it replicated, as for the last batch of an
            evaluation; otherwise they raise.

        Raises:
          SpanaxError: the program cannot be sharded as requested, or there are too few devices.
        """
        users = None if self.mesh is not None else user_mesh([*arrays, *batch])
        if self.plan is None and self.on is None:
            self._follow(users)
        is_equal = self.plan is not None and self.plan.fingerprint == program.fingerprint
        decides = self.plan is None and not (is_like and self.request.is_placed)
        if self.plan is not None and is_equal:
            check_made_for(program, self.plan)
            plan = self.plan
        elif decides:
            request = replace(self.request, attention=losses.attention, loss_chunks=losses.loss_chunks)
            try:
                plan = decided(program, self.cluster(), request)
            except IdleAxisError as error:
                raise _with_like(error, arrays) from None
        else:
            request = self._decided(program)
            plan = _planned_like(program, self.cluster(), request, losses, is_like=is_like)
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
        if not (is_equal and self.is_requested):
            plan = anchored(program, plan, self._specs(program, arrays, self.mesh))
        if decides:
            self.plan = plan
        return plan

    def _decided(self, program: Program) -> Request:
        """Returns the layout and the mesh of the first function, or else those of the request."""
        if self.plan is not None:
            names = [name for name, _ in self.plan.schedule.padded]
            return Request(layout=self.plan.layout, mesh=self.plan.mesh, pins=dict(self.plan.pins), pad=names)
        _, layout, mesh = requested_layout(program, self.cluster(), self.request)
        return replace(self.request, layout=layout, mesh=mesh)

    def _specs(self, program: Program, arrays: Sequence[Any], mesh: jax.sharding.Mesh) -> dict[str, Spec]:
        """Returns the specs of leaves that are sharded already, or that the plan of the first function has, by path."""
        leaves = () if self.plan is None else self.plan.leaves
        planned = {(leaf.path, leaf.shape, leaf.dtype): leaf.spec for leaf in leaves}
        specs = dict[str, Spec | None]()
        for leaf, array in zip(program.leaves, arrays, strict=False):
            known = planned.get((leaf.path, leaf.shape, str(leaf.dtype)))
            sharding = _sharding_in(array, mesh)
            specs[leaf.path] = known if sharding is None else _spec(sharding, leaf)
        return {path: spec for path, spec in specs.items() if spec is not None}

    def cluster(self) -> Cluster:
        """Returns the devices that functions are planned for."""
        if self.on is not None:
            return cluster_of(self.on)
        join_group()
        devices = jax.devices()
        if self.plan is not None:
            devices = devices[: self.plan.mesh.size]
        elif self.request.mesh is not None:
            size = MeshShape.of(self.request.mesh).size
            # Of 8 devices, a mesh of 4 is a choice, and one of 6 a mistake: the plan refuses it.
            devices = devices[:size] if len(devices) % size == 0 else devices
        return local(devices)

    def other_kind(self) -> str:
        """Returns the kind of the devices that functions run on, if they are planned for another; otherwise nothing."""
        if self.on is None or self.mesh is None:
            return ""
        machine = self.cluster()
        device = self.mesh.devices.flat[0]
        is_unnamed = not machine.chip.device_kinds and machine.platform == device.platform
        return "" if is_of_kind(machine, device.device_kind) or is_unnamed else str(device.device_kind)

    def _follow(self, mesh: jax.sharding.Mesh | None) -> None:
        """Requests the user's mesh that arrays are on if no other is requested and the layout is one of that mesh."""
        layout = self.request.layout
        if mesh is None or self.request.mesh is not None:
            return
        try:
            shape = MeshShape.of(mesh)
            if layout is None:
                layout_for(shape)
            elif isinstance(layout, str):
                layout_named(layout, shape)
        except MeshError:
            return
        self.request, self.on = replace(self.request, mesh=shape), local([*mesh.devices.flat])


def _of_same_devices(users: jax.sharding.Mesh | None, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh | None:
    """Returns the user's mesh if it is Explicit and has the devices of the plan's."""
    if users is None or not is_explicit(users):
        return None
    return users if [*users.devices.flat] == [*mesh.devices.flat] else None


def _planned_like(program: Program, cluster: Cluster, request: Request, losses: LossOptions, *, is_like: bool) -> Plan:
    """Returns the plan of a program on the mesh of a request, whose axes may have nothing to shard in it."""
    known = {*program.step.axes.names.values()}
    layout = request.layout
    assert isinstance(layout, Layout)
    pins = {axis: pin for axis, pin in request.pins.items() if axis in known}
    request = replace(request, pins=pins, attention=losses.attention, loss_chunks=losses.loss_chunks, offload=())
    while True:
        try:
            divided = known.intersection(name for _, names in layout.computed for name in names)
            padded = [name for name in request.padded if name in divided]
            return decided(program, cluster, replace(request, layout=layout, pad=padded))
        except IdleAxisError as error:  # such as `data` where a function has no batch: it computes replicated there
            layout = _stored_without(layout, error.axis) if error.in_storage else _without(layout, error.axis)
        except IndivisibleError as error:
            if not is_like or error.axis not in dict(layout.computed):
                raise
            warnings.warn(f"{first_line(error)} It is computed replicated over '{error.axis}'.", stacklevel=7)
            layout = _without(layout, error.axis)


def _stored_without(layout: Layout, axis: str) -> Layout:
    stored: dict[str, Any] = {
        name: tuple(other for other in getattr(layout, name) if other != axis)
        for name in ("stored_params", "stored_gradients", "stored_optimizer")
    }
    return replace(layout, **stored)


def _without(layout: Layout, axis: str) -> Layout:
    return replace(layout, computed=tuple(pair for pair in layout.computed if pair[0] != axis))


def _with_like(error: IdleAxisError, arrays: Sequence[Any]) -> IdleAxisError:
    """Returns the error of an idle mesh axis; where objects are sharded already, only their mesh remains possible."""
    if error.in_storage or not any(
        isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 for array in arrays
    ):
        return error
    fix = "spanax.jit(function, like=train_step), with the function that sharded the objects"
    return IdleAxisError(first_line(error), axis=error.axis, fix=fix)


def place(path: str, array: Any, sharding: jax.sharding.Sharding, mesh: jax.sharding.Mesh) -> jax.Array:
    """Returns an array with a sharding, in buffers of its own unless it already has it.

    Raises:
      SpanaxError: it has no value, or is sharded over another mesh than this one or the user's Explicit mesh.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ObjectsError(f"`{path}` is a shape without a value.", fix="spanax.init, which creates sharded objects")
    array = array if isinstance(array, jax.Array) else jnp.asarray(array)
    check_alive(path, array)
    is_placed = is_on(array, mesh)
    if len(array.sharding.device_set) > 1 and not is_placed and not is_typed(array):
        raise ObjectsError(
            f"`{path}` is already sharded over another mesh.",
            where=f"{array.sharding}; this function's mesh is {dict(mesh.shape)}",
            fix="spanax.reshard(objects, like=function), or jax.device_put to spanax.shardings(objects, plan)",
        )
    is_users = is_typed(array) and array.sharding.device_set == sharding.device_set
    if not is_users and not is_placed:
        return placed(array, sharding)
    is_between_types = is_users and array.sharding.mesh != sharding.mesh
    if array.sharding.is_equivalent_to(sharding, array.ndim) and not is_between_types:
        return array
    # `device_put` reuses the buffers of devices whose shard does not change.
    return private_copy(jax.device_put(array, sharding))


def is_on(array: Any, mesh: jax.sharding.Mesh) -> bool:
    """Returns whether an array, or a shape with a sharding, is sharded over a mesh."""
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def _sharding_in(array: Any, mesh: jax.sharding.Mesh) -> NamedSharding | None:
    """Returns the sharding over the mesh of an array that is on it, or on the user's Explicit mesh of its devices."""
    if is_on(array, mesh):
        return array.sharding
    # Under an Explicit mesh, JAX replicates new arrays unasked.
    if not isinstance(array, jax.Array) or not is_typed(array) or array.is_fully_replicated:
        return None
    sharding = sharding_on(array.sharding, mesh)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh == mesh else None


def _spec(sharding: NamedSharding, leaf: Leaf) -> Spec:
    """Returns the mesh axes of several devices that shard each dim; the words of random keys are no dim."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in sharding.spec]
    entries = (entries + [()] * len(leaf.shape))[: len(leaf.shape)]
    return tuple(tuple(axis for axis in by if sharding.mesh.shape[axis] > 1) for by in entries)
