"""`Plan.constrain`: a function with the sharding constraints of a plan, for the user's own `jax.jit`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx

from spanax.errors import ObjectsError, PlanMismatchError
from spanax.jit.call import is_object, split_call
from spanax.jit.objects import Objects
from spanax.jit.placement import SharedPlacement
from spanax.jit.results import with_objects
from spanax.jit.sharded_function import ShardedFunction
from spanax.jit.shardings import mesh_of
from spanax.plan.candidates.request import Request
from spanax.plan.plan import Plan
from spanax.step.compiled_function import CompiledFunction
from spanax.trace.user_mesh import is_typed, outside_meshes


def constrain(
    function: Callable[..., Any],
    plan: Plan,
    *,
    mesh: jax.sharding.Mesh | None = None,
    devices: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """Returns a function with the sharding constraints of a plan on its arguments, values and results.

    Args:
      function: the function.
      plan: the plan.
      mesh: a mesh with the axes of the plan; by default, the plan's mesh on `devices`.
      devices: the devices of the mesh; the first of `jax.devices()` by default.

    Raises:
      SpanaxError: the mesh is not the plan's, or there are too few devices.
    """
    on = mesh_of(plan, mesh, devices)

    @functools.wraps(function)
    def constrained(*args: Any, **kwargs: Any) -> Any:
        numbers = frozenset(index for index, value in enumerate(args) if _is_static(value))
        names = frozenset(name for name, value in kwargs.items() if _is_static(value))
        form, nodes, arrays = split_call(args, kwargs, numbers, names)
        objects = Objects.of(nodes)
        if not objects.is_traced and not any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise ObjectsError(
                f"`{getattr(function, '__name__', 'function')}` is constrained, and runs in jax.jit or nnx.jit only.",
                fix="nnx.jit(plan.constrain(function)), or spanax.jit(function, plan=plan)",
            )
        _check_context(on, [*objects.arrays(), *arrays])
        sharded = ShardedFunction(function, SharedPlacement(Request(), None, plan, on), False, numbers, names)
        planned = sharded.prepare(*args, **kwargs)
        compiled = CompiledFunction(sharded.program, planned, on, donate=False)
        _check_schedule(compiled, plan)
        return outside_meshes(_run)(compiled, objects, arrays)

    return constrained


def _check_context(mesh: jax.sharding.Mesh, arrays: Sequence[Any]) -> None:
    """Checks that arrays can be constrained to shardings over a mesh.

    Raises:
      SpanaxError: `jax.set_mesh` has another mesh, or the sharding of an array is part of its type.
    """
    current = jax.sharding.get_abstract_mesh()
    is_other = not current.empty and dict(current.shape) != dict(mesh.shape)
    if is_other or any(is_typed(array) for array in arrays if isinstance(array, jax.Array)):
        raise PlanMismatchError(
            "the surrounding mesh is not the plan's, or has Explicit axes.",
            where=f"{current or 'the mesh of an array'}; the plan's mesh is {dict(mesh.shape)}",
            fix="spanax.jit(function, plan=plan), or objects created without jax.set_mesh",
        )


def _check_schedule(compiled: CompiledFunction, plan: Plan) -> None:
    """Checks that a function which trains has the plan's rematerialization, microbatches and loss chunks.

    Raises:
      SpanaxError: the plan is for other arguments, for which these are not known to apply.
    """
    trains = any(compiled.plan.leaves[index].kind == "param" for index in compiled.updated)
    if trains and compiled.plan.schedule != plan.schedule:
        raise PlanMismatchError(
            "the function trains on other arrays than those of the plan, whose schedule would not apply.",
            where=f"planned {plan.schedule}",
            fix="a plan for these arrays: spanax.jit(function, ...).prepare(...)",
        )


def _run(compiled: CompiledFunction, objects: Objects, arrays: Sequence[Any]) -> Any:
    """Adds the operations of a function to the surrounding trace, and returns its results."""
    state = [
        jax.lax.with_sharding_constraint(jnp.asarray(array), sharding)
        for array, sharding in zip(objects.arrays(), compiled.state, strict=True)
    ]
    batch = [
        jax.lax.with_sharding_constraint(jnp.asarray(array), sharding)
        for array, sharding in zip(arrays, compiled.batch, strict=True)
    ]
    outputs = compiled.outputs([*state, *batch])
    _check_writable(compiled, objects)
    objects.update(
        compiled.updated,
        [jax.lax.with_sharding_constraint(outputs[index], compiled.state[index]) for index in compiled.updated],
    )
    results = jax.tree.unflatten(compiled.program.step.result, outputs[len(state) :])
    return with_objects(results, objects.by_path)


def _check_writable(compiled: CompiledFunction, objects: Objects) -> None:
    """Checks that the objects belong to the surrounding trace.

    Raises:
      SpanaxError: an object that the function updates was created outside of it.
    """
    for index in compiled.updated:
        slot = objects.slots[index]
        try:
            if isinstance(slot, nnx.Variable):
                slot.set_raw_value(slot.get_raw_value())
        except errors.TraceContextError as error:
            raise ObjectsError(
                f"`{compiled.program.leaves[index].path}` is updated inside of a trace, but was created outside of it.",
                fix="pass the objects as arguments of nnx.jit, or nnx.split and nnx.merge them in jax.jit",
            ) from error


def _is_static(value: Any) -> bool:
    """Returns whether an argument has neither objects nor arrays, so that it is static in the surrounding trace."""
    leaves = jax.tree.leaves(value, is_leaf=is_object)
    return not any(is_object(leaf) or hasattr(leaf, "__array__") or hasattr(leaf, "__jax_array__") for leaf in leaves)
