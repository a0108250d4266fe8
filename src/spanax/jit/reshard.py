"""`spanax.reshard`: gives NNX objects the shardings of a function or a plan, in place."""

from typing import Any

import jax

from spanax.errors import ArgumentError, ObjectsError
from spanax.jit.call import is_object
from spanax.jit.objects import Objects
from spanax.jit.sharded_function import LIKE, ShardedFunction
from spanax.jit.shardings import mesh_of, placements
from spanax.plan.plan import Plan
from spanax.run.state.sharded_init import placed
from spanax.run.step.donation import check_alive, private_copy
from spanax.trace.user_mesh import is_typed, outside_meshes


def reshard(objects: Any, *, like: ShardedFunction | Plan) -> None:
    """Shards the arrays of NNX objects in place, as a function of `spanax.jit` or a plan does.

    Objects that are sharded over another mesh, or created under one, can then be passed to the function. Each array is
    copied; the previous one is freed unless something else holds it.

    Args:
      objects: the model, the optimizer, or a tuple of objects in the order of the function's arguments.
      like: a function that was called or prepared, or a plan, whose mesh then has the first of `jax.devices()`.

    Raises:
      SpanaxError: the function has no plan yet, or the plan has no sharding for an array.

    Example:
      >>> import jax, spanax
      >>> from flax import nnx
      >>> model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      >>> on_two = spanax.jit(lambda model, x: model(x), mesh="fsdp=2")
      >>> on_all = spanax.jit(lambda model, x: model(x), mesh="fsdp=8")
      >>> for function in (on_two, on_all):
      ...     plan = function.prepare(model, jax.ShapeDtypeStruct((8, 16), "float32"))
      ...     reshard(model, like=function)
      >>> model.kernel.sharding.shard_shape(model.kernel.shape)
      (16, 4)
    """
    nodes = objects if isinstance(objects, tuple) else (objects,)
    if not isinstance(like, ShardedFunction | Plan):
        raise ArgumentError.of("like", like, f"{LIKE}, or a plan")
    if not nodes or not all(map(is_object, nodes)):
        raise ObjectsError(
            f"`objects` is a {type(objects).__name__}, not NNX objects.", fix="the model, or (model, optimizer)"
        )
    plan, mesh = (like, None) if isinstance(like, Plan) else (like.plan, like.placement.mesh)
    on, flat = mesh_of(plan, mesh, None), Objects.of(nodes)
    arrays = []
    for placement, array in zip(placements(nodes, plan), flat.arrays(), strict=True):
        check_alive(placement.path, array)
        arrays.append(outside_meshes(_resharded)(array, placement.sharding(on)))
    flat.update(range(len(arrays)), arrays)


def _resharded(array: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    is_on_devices = isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 and not is_typed(array)
    return private_copy(jax.device_put(array, sharding)) if is_on_devices else placed(array, sharding)
