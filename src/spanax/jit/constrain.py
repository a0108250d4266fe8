"""`Plan.constrain`: a function with the sharding constraints of a plan, for the user's own `jax.jit`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx

from spanax.errors import SpanaxError
from spanax.jit.call import as_array, is_object, split_call
from spanax.jit.objects import Objects
from spanax.jit.placement import SharedPlacement
from spanax.jit.results import with_objects
from spanax.jit.sharded_function import ShardedFunction
from spanax.jit.shardings import mesh_of
from spanax.plan.choose import Request
from spanax.plan.plan import Plan
from spanax.run.step.compiled_function import CompiledFunction


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
            raise SpanaxError(
                f"`{getattr(function, '__name__', 'function')}` is constrained, and runs in jax.jit or nnx.jit only.",
                fix="nnx.jit(plan.constrain(function)), or spanax.jit(function, plan=plan)",
            )
        sharded = ShardedFunction(function, SharedPlacement(Request(), None, plan, on), False, numbers, names)
        planned = sharded.prepare(*args, **kwargs)
        state = tuple(placement.sharding(on) for placement in planned.leaves)
        compiled = CompiledFunction(sharded.program, planned, on, state, donate=False)
        return _run(compiled, objects, arrays)

    return constrained


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
            raise SpanaxError(
                f"`{compiled.program.leaves[index].path}` is updated inside of a trace, but was created outside of it.",
                fix="pass the objects as arguments of nnx.jit, or nnx.split and nnx.merge them in jax.jit",
            ) from error


def _is_static(value: Any) -> bool:
    """Returns whether an argument has neither objects nor arrays, so that it is static in the surrounding trace."""
    leaves = jax.tree.leaves(value, is_leaf=is_object)
    return not any(is_object(leaf) or _is_array(leaf) for leaf in leaves)


def _is_array(value: Any) -> bool:
    if isinstance(value, bool | int | float | complex | str):
        return False
    try:
        as_array(value)
    except SpanaxError:
        return False
    return True
