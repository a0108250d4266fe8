"""Traces a program under the user's mesh and removes that mesh from the result.

Under Explicit axes every type carries a sharding, and operations refer to meshes that are not the plan's.
"""

import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from spanax.errors import ModelMeshError
from spanax.trace.jaxpr.graph import HIGH_LEVEL, INLINED, Op, called, from_jaxpr, opened, remat_of
from spanax.trace.jaxpr.interpret import evaluate, rematted, retraced
from spanax.trace.variables import Leaf

NO_MESH = AbstractMesh((), ())

PLACING = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
"""Operations that change the sharding or type of a value, but not its elements."""

JAX = str(Path(jax.__file__).parent) + os.sep


def outside_meshes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function wrapped to run outside the user's mesh, since its arrays are on another mesh."""

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _without_mesh():
            return function(*args, **kwargs)

    return outside


def _without_mesh() -> AbstractContextManager[Any]:
    if _current().empty:
        return nullcontext()
    try:
        return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
    except ValueError:  # inside `jax.jit`, which has only an abstract mesh
        return jax.sharding.use_abstract_mesh(NO_MESH)


def methods_outside_meshes(kind: type) -> type:
    """Returns the class with its public methods wrapped by `outside_meshes`."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, outside_meshes(method))
    return kind


@dataclass(frozen=True)
class UserMesh:
    """The mesh under which a program is traced, and the shardings of its arguments on it."""

    mesh: AbstractMesh
    state: tuple[NamedSharding | None, ...] = ()
    batch: tuple[NamedSharding | None, ...] = ()

    @staticmethod
    def of(batch: Any, state: Sequence[Any] = ()) -> "UserMesh":
        """Returns the mesh of `jax.set_mesh`, or else the Explicit mesh of a batch of shapes, or of arrays."""
        shardings = tuple(_explicit(leaf.sharding) for leaf in jax.tree.leaves(batch))
        stored = (_explicit(getattr(array, "sharding", None)) for array in state)
        meshes = (sharding.mesh for sharding in chain(shardings, stored) if sharding is not None)
        return UserMesh(_current() if not _current().empty else next(meshes, NO_MESH), (), shardings)

    def with_state(self, leaves: Sequence[Leaf]) -> "UserMesh":
        """Returns a copy with the annotated shardings of the state's leaves."""
        return UserMesh(self.mesh, tuple(map(self._annotated, leaves)), self.batch)

    def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function traced under this mesh into operations that run under any mesh.

        Raises:
          SpanaxError: JAX cannot trace it with these shardings.
        """
        return function if self.mesh.empty else partial(self._evaluated, function)

    def untyped(self, batch: Any) -> Any:
        """Returns the shapes and dtypes of a batch, without shardings."""
        plain = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
        return jax.tree.map(plain, batch) if is_explicit(self.mesh) else batch

    def _evaluated(self, function: Callable[..., Any], *args: Any) -> Any:
        closed, shapes = self._typed(function, args)
        with jax.sharding.use_abstract_mesh(NO_MESH):
            outs = _run(closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    def _typed(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[core.ClosedJaxpr, Any]:
        leaves, treedef = jax.tree.flatten(args)
        num_state = len(leaves) - len(self.batch)
        typed, without_state = (part + self.batch for part in (self.state or (None,) * num_state, (None,) * num_state))
        errors: list[Exception] = []
        # With unsharded arrays JAX accepts more programs, and under Auto axes those that it cannot type, such as a
        # dropout of a sharded batch; results are the same.
        attempts = [(self.mesh, typed), (self.mesh, without_state), (_auto(self.mesh), (None,) * len(leaves))]
        for mesh, shardings in dict.fromkeys(attempts):
            pairs = zip(map(jax.typeof, leaves), shardings, strict=True)
            avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval, sharding in pairs]
            try:
                with jax.sharding.use_abstract_mesh(mesh):
                    return jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(treedef, avals))
            except Exception as error:
                if not is_explicit(self.mesh) or not _is_raised_by_jax(error):
                    raise
                errors.append(error)
        if _raised_at(errors[-1]) == _raised_at(errors[0]):  # without sharded types, too: an error of the program
            raise errors[-1]
        sizes = ",".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        raise ModelMeshError(
            f"the program cannot be traced under the Explicit mesh {sizes}.",
            where=(str(errors[0]).splitlines() or [""])[0][:160],
            fix="shard the batch as in your own loop: jax.device_put(batch, P(...))",
        ) from errors[0]

    def _annotated(self, leaf: Leaf) -> NamedSharding | None:
        if leaf.annotation is None or len(leaf.annotation) > len(leaf.shape) or not is_explicit(self.mesh):
            return None
        names = set(self.mesh.axis_names)
        spec = [name if set(name if isinstance(name, tuple) else [name]) <= names else None for name in leaf.annotation]
        return NamedSharding(self.mesh, PartitionSpec(*spec))


def _current() -> AbstractMesh:
    return jax.sharding.get_abstract_mesh()


def user_mesh(arrays: Iterable[Any]) -> Mesh | None:
    """Returns the mesh of `jax.set_mesh`, or else that of the first array on several devices, if any."""
    current = jax.sharding.get_mesh()
    if not current.empty:
        return current
    shardings = [array.sharding for array in arrays if isinstance(array, jax.Array)]
    meshes = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.size > 1), None)


def _auto(mesh: AbstractMesh) -> AbstractMesh:
    """Returns the mesh with Auto axes instead of Explicit ones."""
    kinds = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    return mesh.update(axis_types=kinds)


def is_explicit(mesh: AbstractMesh | Mesh) -> bool:
    """Returns whether arrays on the mesh have a sharding in their types."""
    return AxisType.Explicit in mesh.axis_types


def _explicit(sharding: Any) -> NamedSharding | None:
    """Returns the sharding that is part of a type, or None if its mesh has no Explicit axes."""
    if (
        not isinstance(sharding, NamedSharding)
        or sharding.mesh.empty
        or AxisType.Explicit not in sharding.mesh.axis_types
    ):
        return None
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)


def _is_raised_by_jax(error: Exception) -> bool:
    """Returns whether JAX itself raised, rather than the user's code or Spanax."""
    return _raised_at(error)[0].startswith(JAX)


def _raised_at(error: Exception) -> tuple[str, int]:
    """Returns the file and the line that raised an error."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename, line


def _run(jaxpr: core.Jaxpr | core.ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a jaxpr with shardings in its types by operations without them."""
    graph = from_jaxpr(jaxpr, INLINED - {HIGH_LEVEL}, as_traced=True)
    graph = replace(graph, constants={value: off_mesh(const) for value, const in graph.constants.items()})
    mesh = _current()

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any]:
        with op.eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            return _outputs(op.eqn, ins)

    return evaluate(graph, args, override)


def _outputs(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    primitive = eqn.primitive
    if primitive.name in PLACING:
        return operands[:1]
    if primitive.name == "device_put":
        return [_moved(array, var.aval.memory_space) for array, var in zip(operands, eqn.outvars, strict=True)]
    if primitive.name == HIGH_LEVEL:
        remat = remat_of(eqn)
        inner = partial(_run, called(eqn, operands)[0] if remat is None else remat["jaxpr"])
        return inner(*operands) if remat is None else rematted(remat, inner)(*operands)
    if primitive.name == "shard_map":
        return _mapped(eqn, operands)
    params = primitive.get_bind_params({key: _plain(value) for key, value in eqn.params.items()})
    results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def _moved(array: Any, space: Any) -> Any:
    return array if jax.typeof(array).memory_space == space else jax.device_put(array, space)


def _mapped(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Applies a `shard_map` over the same axes, with Explicit axes as Auto."""
    params = eqn.params
    mesh = _auto(params["mesh"].abstract_mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(
            lambda *args: tuple(_run(params["jaxpr"], *args)),
            mesh=mesh,
            in_specs=params["in_specs"],
            out_specs=params["out_specs"],
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return list(mapped(*operands))


def _plain(value: Any) -> Any:
    """Returns a parameter of an operation without shardings."""
    if isinstance(value, tuple) and value and all(isinstance(each, core.Jaxpr | core.ClosedJaxpr) for each in value):
        return tuple(map(_plain, value))
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        inner, _ = opened(value)
        is_plain = all(hasattr(var.aval, "sharding") for var in inner.invars)  # a kernel's references have none
        return retraced(value, partial(_run, value)) if is_plain else value
    return None if isinstance(value, NamedSharding) else value


def is_typed(array: jax.Array) -> bool:
    """Returns whether the type of an array has a sharding, on a mesh with Explicit axes."""
    return _explicit(jax.typeof(array).sharding) is not None


def sharding_on(sharding: jax.sharding.Sharding, mesh: Mesh | None) -> jax.sharding.Sharding:
    """Returns the same sharding on another mesh of the same devices; as it is if that mesh has other axes."""
    if mesh is None or not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(mesh.shape):
        return sharding
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def on_mesh(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns the array, in the same buffers, on another mesh of the same devices where it can be."""
    is_replicated = array.sharding.is_fully_replicated
    return jax.device_put(
        array, NamedSharding(mesh, PartitionSpec()) if is_replicated else sharding_on(array.sharding, mesh)
    )


def off_mesh(value: Any) -> Any:
    """Returns the value, copied to the host if it is a concrete array on a mesh with Explicit axes."""
    return on_host(value) if isinstance(value, jax.Array) and is_typed(value) else value


def on_host(array: jax.Array) -> Any:
    """Returns an array as a NumPy array; PRNG keys, which NumPy lacks, as a new JAX array."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.asarray(jax.random.key_data(array)), impl=jax.random.key_impl(array))
    return np.asarray(array)
