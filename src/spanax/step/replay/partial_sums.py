"""Evaluates operations on partial sums, whose reduction over mesh axes is deferred.

A partial sum has one leading dim for each mesh axis over which it is still to be reduced, of the size of that axis and
sharded over it, so that each device stores only its own term.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from spanax.plan.spmd.deferred_reductions import DeferredReductions, Dims
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.linear import linear_operands

Ways = Mapping[str, int]
"""The size of each mesh axis."""


def evaluate_partial_sums(
    graph: Graph,
    op: Op,
    ins: Sequence[Any],
    has: Sequence[Sequence[str]],
    deferred: DeferredReductions,
    mesh: Mesh,
    manual: frozenset[str],
) -> list[Any]:
    """Evaluates an operation without bodies whose result has leading dims; `has` are the axes of those of its operands.

    The result is a partial sum, or differs between devices. What all devices have is a term of a sum on one of them.
    """
    ways = mesh.shape
    axes = deferred.of(op.outputs[0])
    dims = deferred.sums.get(op)
    if dims is not None and op.name == "conv_general_dilated":
        return _device_by_device(op, ins, dims, axes, mesh, manual)
    is_sum = op.outputs[0] not in deferred.varying
    mapped: list[Any] = []
    for index, array in enumerate(ins):
        split_dims = None if dims is None else dims[index]
        if split_dims is not None:
            mapped.append(split_contracted_dims(array, has[index], split_dims, axes, ways))
        elif dims is not None or has[index] or (is_sum and _joins(graph, op, index)):
            mapped.append(add_partial_sum_dims(array, has[index], axes, ways))
        else:
            mapped.append(None)
    in_axes = [None if array is None else 0 for array in mapped]
    function: Any = lambda *arrays: op.bind(arrays)  # noqa: E731
    if not any(has) and not is_sum:
        return [jnp.broadcast_to(out, (*(ways[axis] for axis in axes), *jnp.shape(out))) for out in function(*ins)]
    for _ in axes:
        function = jax.vmap(function, in_axes=in_axes)
    return function(*(operand if array is None else array for array, operand in zip(mapped, ins, strict=True)))


def _device_by_device(
    op: Op, ins: Sequence[Any], dims: Sequence[Dims | None], axes: Sequence[str], mesh: Mesh, manual: frozenset[str]
) -> list[Any]:
    """Evaluates a convolution on each device's shard of the batch.

    Under `vmap` it would become a grouped convolution, for which XLA gathers the batch.
    """

    def spec(array: Any, split_dims: Dims | None) -> PartitionSpec:
        by_dim = dict(split_dims or ())
        return PartitionSpec(
            *(tuple(axis for axis in by_dim.get(dim, ()) if axis in axes) for dim in range(array.ndim))
        )

    specs = tuple(spec(array, split_dims) for array, split_dims in zip(ins, dims, strict=True))
    local_op = lambda *shards: jnp.expand_dims(op.bind(shards)[0], range(len(axes)))  # noqa: E731
    # Where mesh axes are manual already, `shard_map` takes the mesh from its surroundings.
    mesh_argument: dict[str, Any] = {} if manual else {"mesh": mesh}
    return [
        jax.shard_map(
            local_op,
            in_specs=specs,
            out_specs=PartitionSpec(*axes),
            axis_names=set(axes),
            check_vma=False,
            **mesh_argument,
        )(*ins)
    ]


def split_contracted_dims(array: Any, has: Sequence[str], dims: Dims, axes: Sequence[str], ways: Ways) -> Any:
    """Splits the dims of an array that are contracted into parts for `axes`; `has` are the axes of its leading dims."""
    axes_of_dim = dict(dims)
    sizes = list(array.shape[len(has) :])
    split_shape = [ways[axis] for axis in has]
    position = {axis: index for index, axis in enumerate(has)}
    for dim, size in enumerate(array.shape[len(has) :]):
        dim_axes = axes_of_dim.get(dim, ())
        position |= {axis: len(split_shape) + index for index, axis in enumerate(dim_axes)}
        split_shape += [*(ways[axis] for axis in dim_axes), size // math.prod(ways[axis] for axis in dim_axes)]
        sizes[dim] = size // math.prod(ways[axis] for axis in dim_axes if axis in axes)
    array = jnp.moveaxis(array.reshape(split_shape), [position[axis] for axis in axes], range(len(axes)))
    return array.reshape(*(ways[axis] for axis in axes), *sizes)


def add_partial_sum_dims(array: Any, has: Sequence[str], axes: Sequence[str], ways: Ways) -> Any:
    """Adds leading dims for further axes to a value: the first device has the value, the others zeros."""
    for index, axis in enumerate(axes):
        if axis not in has:
            array = jnp.asarray(array, array.dtype)  # a constant zero of the program is not an array yet
            rank = array.ndim - index
            is_first = (jnp.arange(ways[axis]) == 0).reshape(-1, *(1,) * rank)
            array = jnp.where(is_first, jnp.expand_dims(array, index), jnp.zeros((), array.dtype))
    return array


def merged_leading(array: Any, has: Sequence[str], left: Sequence[str]) -> Any:
    """Merges the leading dims to reduce into one, in front of the other leading dims.

    XLA would reduce separate dims one after the other, with a full all-reduce each.
    """
    reduced = [index for index, axis in enumerate(has) if axis not in left]
    array = jnp.moveaxis(array, reduced, range(len(reduced)))
    return array.reshape(-1, *array.shape[len(reduced) :])


def scatters(spec: Sequence[Sequence[str]], summed: Sequence[str]) -> bool:
    """Returns whether scattering sums over axes can shard a value like `spec`: they are the innermost of each dim."""
    parts = [[axis in summed for axis in by] for by in spec]
    return any(map(any, parts)) and all(part == sorted(part) for part in parts)


def scattered_sum(
    array: Any, summed: Sequence[str], spec: Sequence[str | Sequence[str]], mesh: Mesh, manual: frozenset[str]
) -> Any:
    """Returns partial sums, reduced over their first dim and sharded like `spec`, by explicit reduce-scatters.

    For a sum under a sharding constraint, compilers may all-reduce the whole value and slice it.
    """
    names = [tuple(axis for axis in ((by,) if isinstance(by, str) else by) if axis not in manual) for by in spec]
    before = [tuple(axis for axis in by if axis not in summed) for by in names]

    def local_sum(terms: Any) -> Any:
        return _summed(terms[0], summed, names, mesh)

    in_spec = PartitionSpec(tuple(summed), *before)
    out_spec = PartitionSpec(*names)
    mesh_argument: dict[str, Any] = {"axis_names": set(mesh.axis_names) - manual} if manual else {"mesh": mesh}
    return jax.shard_map(local_sum, in_specs=in_spec, out_specs=out_spec, check_vma=False, **mesh_argument)(array)


def summed_here(mesh: Mesh, array: Any, summed: Sequence[str], pending: Sequence[str], spec: Sequence[Any]) -> Any:
    """Returns the sum of the terms of devices, inside of a `shard_map`, sharded like `spec`.

    Terms over axes that are `pending` are added later, and have a leading dim for each. A sum of fewer than 32 bits is
    computed in float32: XLA for CPUs aborts at other sums over manual axes.
    """
    summed = [axis for axis in summed if axis not in pending]
    array = jnp.expand_dims(array, range(len(pending)))
    if not summed:
        return array
    names = [(by,) if isinstance(by, str) else tuple(by or ()) for by in spec]
    is_narrow = array.dtype.itemsize < 4 and jnp.issubdtype(array.dtype, jnp.floating)
    terms = array.astype(jnp.float32) if is_narrow else array
    return _summed(terms, summed, names, mesh).astype(array.dtype)


def _summed(array: Any, summed: Sequence[str], names: Sequence[Sequence[str]], mesh: Mesh) -> Any:
    """Returns the sum over devices, scattered over those of the axes that are in `names` of its dims."""
    remaining = set(summed)
    for dim, by in enumerate(names):
        if axes := tuple(axis for axis in by if axis in summed):
            array = _scattered(array, dim, axes, math.prod(mesh.shape[axis] for axis in axes))
            remaining -= set(axes)
    return jax.lax.psum(array, tuple(axis for axis in summed if axis in remaining)) if remaining else array


def _scattered(array: Any, dim: int, axes: tuple[str, ...], count: int) -> Any:
    """Returns the sum of an array over devices, of which each has one of `count` parts along a dim.

    The parts are stacked along a first dim: a TPU's compiler scatters no parts of the tiles that the last dims form.
    """
    shape = array.shape
    parts = jnp.moveaxis(array.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]), dim, 0)
    # Parts of more than two dims, it all-reduces: libtpu 0.0.52 for v5e:2x4, stacked weights of tests/own_kernels.py.
    flat = parts.reshape(count, -1, parts.shape[-1]) if parts.ndim > 3 else parts
    return jax.lax.psum_scatter(flat, axes, scatter_dimension=0, tiled=False).reshape(parts.shape[1:])


def leading_after_stacked(array: Any, axes: Sequence[str]) -> Any:
    """Moves leading dims after the stacked dim: the layout of operands and results of a loop."""
    return jnp.moveaxis(array, range(len(axes)), range(1, len(axes) + 1)) if axes else array


def leading_before_stacked(array: Any, axes: Sequence[str]) -> Any:
    """Inverts `leading_after_stacked`: moves the leading dims in front of the stacked dim."""
    return jnp.moveaxis(array, range(1, len(axes) + 1), range(len(axes))) if axes else array


def _joins(graph: Graph, op: Op, index: int) -> bool:
    """Returns whether an operand is added rather than multiplied, so that it must count only once."""
    if op.name in ("mul", "div"):
        return False
    value = op.inputs[index]
    is_zero = value in graph.constants and not np.any(graph.constants[value])
    return not is_zero and index in linear_operands(op)
