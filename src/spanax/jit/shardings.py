"""`spanax.shardings` and `spanax.reshard`: the shardings of a plan as a pytree, or given to objects in place."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from spanax.errors import ArgumentError, ObjectsError, PlanMismatchError
from spanax.jit.call import is_object
from spanax.jit.objects import Objects
from spanax.jit.sharded_function import LIKE, ShardedFunction
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement
from spanax.step.donation import check_alive, private_copy
from spanax.step.sharded_init import placed
from spanax.trace.user_mesh import is_typed, outside_meshes
from spanax.trace.variables import OPTIMIZER, Leaf, Owner, take_apart


def shardings(
    objects: Any, plan: Plan, *, mesh: jax.sharding.Mesh | None = None, devices: Sequence[Any] | None = None
) -> Any:
    """Returns the shardings of NNX objects under a plan, with the structure of `nnx.state(objects)`.

    The result is a pytree of `NamedSharding`s for `in_shardings` and `out_shardings` of `jax.jit`, for
    `jax.device_put`, and for checkpoint libraries. `nnx.StateSharding` accepts it for `nnx.jit`.

    Args:
      objects: the model, the optimizer, or a tuple of objects in the order of the planned function's arguments; with
        arrays, or with shapes (`nnx.eval_shape`).
      plan: the plan of a program or of a function of `spanax.jit`.
      mesh: a mesh with the axes of the plan; by default, the plan's mesh on `devices`.
      devices: the devices of the mesh; the first of `jax.devices()` by default.

    Raises:
      SpanaxError: the plan has no sharding for an array, or the mesh is not the plan's.

    Example:
      >>> import optax, spanax
      >>> @spanax.jit(mesh="fsdp=8")
      ... def predict(model, x):
      ...     return model(x)
      >>> model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      >>> plan = predict.prepare(model, jax.ShapeDtypeStruct((8, 16), "float32"))
      >>> state = jax.device_put(nnx.state(model), shardings(model, plan))
      >>> tuple(state["kernel"].sharding.spec)
      (None, 'fsdp')
    """
    nodes = objects if isinstance(objects, tuple) else (objects,)
    on = mesh_of(plan, mesh, devices)
    values = [placement.sharding(on) for placement in placements(nodes, plan)]
    return jax.tree.unflatten(jax.tree.structure(nnx.state(objects)), values)


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
    on = mesh_of(plan, mesh, None)
    flat = Objects.of(nodes)
    arrays = []
    for placement, array in zip(placements(nodes, plan), flat.arrays(), strict=True):
        check_alive(placement.path, array)
        arrays.append(outside_meshes(_resharded)(array, placement.sharding(on)))
    flat.update(range(len(arrays)), arrays)


def mesh_of(plan: Plan, mesh: jax.sharding.Mesh | None, devices: Sequence[Any] | None) -> jax.sharding.Mesh:
    """Returns a mesh of the shape of a plan's, built from devices unless it is passed.

    Raises:
      SpanaxError: the mesh has other axes, or there are too few devices.
    """
    if mesh is None:
        return plan.mesh.build(devices)
    if devices is not None or dict(mesh.shape) != dict(plan.mesh.axes):
        raise PlanMismatchError(
            "`mesh` is not the mesh of the plan." if devices is None else "`mesh` has devices; `devices` are others.",
            where=f"{dict(mesh.shape)}; the plan is for {plan.mesh}",
            fix="a mesh with the names and sizes of the plan's, or `devices` alone",
        )
    return mesh


def placements(nodes: Sequence[Any], plan: Plan) -> list[Placement]:
    """Returns the plan's placement of every array of objects, in the order in which NNX flattens them.

    Raises:
      SpanaxError: the plan has none for an array.
    """
    variables, _ = take_apart([Owner(node, str(index)) for index, node in enumerate(nodes)])
    by_path = {leaf.path: leaf for leaf in plan.leaves}
    split = [(*leaf.path.partition(".")[::2], leaf) for leaf in variables.leaves]
    prefixes: list[str] = []
    for index, node in enumerate(nodes):
        inside = [(path, leaf) for number, path, leaf in split if number == str(index)]
        prefixes.append(_prefix(node, inside, by_path, prefixes))
    result = []
    for number, path, leaf in split:
        placement = plan[_joined(prefixes[int(number)], path)]
        if not _matches(placement, leaf):
            raise PlanMismatchError(
                f"`{placement.path}` is {leaf.dtype}{list(leaf.shape)}, and "
                f"{placement.dtype}{list(placement.shape)} in the plan.",
                fix="a plan for these objects, or the objects that it was made for",
            )
        result.append(placement)
    return result


def _prefix(
    node: Any, arrays: Sequence[tuple[str, Leaf]], by_path: Mapping[str, Placement], used: Sequence[str]
) -> str:
    """Returns what the plan's paths of an object begin with: a name for all objects but the first model."""
    usual = OPTIMIZER if isinstance(node, nnx.Optimizer) else ""
    candidates = dict.fromkeys([usual, "", *(path.partition(".")[0] for path in by_path)])
    for prefix in (prefix for prefix in candidates if prefix not in used):
        planned = [(by_path.get(_joined(prefix, path)), leaf) for path, leaf in arrays]
        if all(placement is not None and _matches(placement, leaf) for placement, leaf in planned):
            return prefix
    return usual


def _joined(prefix: str, path: str) -> str:
    return ".".join(filter(None, (prefix, path)))


def _matches(placement: Placement, leaf: Leaf) -> bool:
    return (placement.shape, placement.dtype) == (leaf.shape, str(leaf.dtype))


def _resharded(array: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    is_on_devices = isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 and not is_typed(array)
    return private_copy(jax.device_put(array, sharding)) if is_on_devices else placed(array, sharding)
