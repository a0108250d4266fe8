"""`spanax.shardings`: the shardings of a plan as a pytree, for `jax.jit`, `jax.device_put` and Orbax."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from spanax.errors import PlanMismatchError
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement
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
    arrays: list[list[tuple[str, Leaf]]] = [[] for _ in nodes]
    for leaf in variables.leaves:
        index, _, path = leaf.path.partition(".")
        arrays[int(index)].append((path, leaf))
    prefixes: list[str] = []
    for node, inside in zip(nodes, arrays, strict=True):
        prefixes.append(_prefix(node, inside, by_path, prefixes))
    result = []
    for leaf in variables.leaves:
        index, _, path = leaf.path.partition(".")
        placement = plan[_joined(prefixes[int(index)], path)]
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
