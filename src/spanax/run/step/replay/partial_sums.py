"""Parts: operations on values of which every device has a part, to be summed up later.

Such a value has leading dims, one for each mesh axis over which it is still to be summed, of the axis's size and split
over it: no device has more of it than its own part.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from spanax.plan.spmd.deferred_reductions import LINEAR, LINEAR_IN, DeferredReductions, Dims
from spanax.trace.jaxpr.graph import Graph, Op

Ways = Mapping[str, int]
"""The size of each mesh axis."""


def in_parts(
    graph: Graph, op: Op, ins: Sequence[Any], known: DeferredReductions, mesh: Mesh, manual: frozenset[str]
) -> list[Any]:
    """The result of an operation without bodies, whose sum is put off or which takes one that is."""
    ways = mesh.shape
    axes, dims = known.of(op.outputs[0]), known.sums.get(op)
    if dims is not None and op.name == "conv_general_dilated":
        return _device_by_device(op, ins, dims, axes, mesh, manual)
    taken: list[Any] = []
    for at, (value, array) in enumerate(zip(op.inputs, ins, strict=True)):
        split = None if dims is None else dims[at]
        if split is not None:
            taken.append(divided(array, known.of(value), split, axes, ways))
        elif dims is not None or known.of(value) or _joins(graph, op, at):
            taken.append(lifted(array, known.of(value), axes, ways))
        else:
            taken.append(None)
    in_axes = [None if array is None else 0 for array in taken]
    function: Any = lambda *arrays: op.bind(arrays)  # noqa: E731
    for _ in axes:
        function = jax.vmap(function, in_axes=in_axes)
    return function(*(given if array is None else array for array, given in zip(taken, ins, strict=True)))


def _device_by_device(
    op: Op, ins: Sequence[Any], dims: Sequence[Dims | None], axes: Sequence[str], mesh: Mesh, manual: frozenset[str]
) -> list[Any]:
    """A convolution of each device's part of the batch: in groups, as `vmap` has it, XLA would gather the batch."""

    def spec(array: Any, split: Dims | None) -> PartitionSpec:
        by_dim = dict(split or ())
        return PartitionSpec(*(tuple(a for a in by_dim.get(dim, ()) if a in axes) for dim in range(array.ndim)))

    specs = tuple(spec(array, split) for array, split in zip(ins, dims, strict=True))
    part = lambda *parts: jnp.expand_dims(op.bind(parts)[0], range(len(axes)))  # noqa: E731
    # Inside of a manual part of the mesh, the mesh is the one that is known there.
    where: dict[str, Any] = {} if manual else {"mesh": mesh}
    return [
        jax.shard_map(
            part, in_specs=specs, out_specs=PartitionSpec(*axes), axis_names=set(axes), check_vma=False, **where
        )(*ins)
    ]


def divided(array: Any, has: Sequence[str], dims: Dims, axes: Sequence[str], ways: Ways) -> Any:
    """An array with what is summed over in parts, one for each device along `axes`; it `has` parts along some."""
    order, sizes = dict(dims), list(array.shape[len(has) :])
    apart = [ways[axis] for axis in has]
    places = {axis: at for at, axis in enumerate(has)}
    for dim, size in enumerate(array.shape[len(has) :]):
        by = order.get(dim, ())
        places |= {axis: len(apart) + at for at, axis in enumerate(by)}
        apart += [*(ways[axis] for axis in by), size // math.prod(ways[axis] for axis in by)]
        sizes[dim] = size // math.prod(ways[axis] for axis in by if axis in axes)
    array = jnp.moveaxis(array.reshape(apart), [places[axis] for axis in axes], range(len(axes)))
    return array.reshape(*(ways[axis] for axis in axes), *sizes)


def lifted(array: Any, has: Sequence[str], axes: Sequence[str], ways: Ways) -> Any:
    """A value as one of which devices have parts along more axes: the first has all of it, the others nothing."""
    for at, axis in enumerate(axes):
        if axis not in has:
            array = jnp.asarray(array, array.dtype)  # a zero that the program knows beforehand is no array yet
            rank = array.ndim - at
            is_first = (jnp.arange(ways[axis]) == 0).reshape(-1, *(1,) * rank)
            array = jnp.where(is_first, jnp.expand_dims(array, at), jnp.zeros((), array.dtype))
    return array


def together(array: Any, has: Sequence[str], left: Sequence[str]) -> Any:
    """An array with the dims of parts that are to be summed as one in front, the others behind it.

    Dims that are split apart the compiler would sum one after the other, a whole sum for each.
    """
    gone = [at for at, axis in enumerate(has) if axis not in left]
    array = jnp.moveaxis(array, gone, range(len(gone)))
    return array.reshape(-1, *array.shape[len(gone) :])


def behind(array: Any, axes: Sequence[str]) -> Any:
    """A stacked value with the dims of parts behind that of the stack, as a loop takes and leaves it."""
    return jnp.moveaxis(array, range(len(axes)), range(1, len(axes) + 1)) if axes else array


def in_front(array: Any, axes: Sequence[str]) -> Any:
    """What a loop left, with the dims of parts in front of that of the stack."""
    return jnp.moveaxis(array, range(1, len(axes) + 1), range(len(axes))) if axes else array


def _joins(graph: Graph, op: Op, at: int) -> bool:
    """Whether an operand is added to the others, rather than multiplied by: then it may count only once."""
    if op.name in ("mul", "div"):
        return False
    value = op.inputs[at]
    is_nothing = value in graph.constants and not np.any(graph.constants[value])
    return not is_nothing and (op.name in LINEAR or at in LINEAR_IN.get(op.name, ()))
