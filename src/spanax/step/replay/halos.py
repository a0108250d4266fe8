"""Exchanges halos between the shards of dims under windows, inside of a `shard_map`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.plan.sharding.operands import ShardedWindow
from spanax.trace.jaxpr.dim_maps.windows import POOL_GRADIENT
from spanax.trace.jaxpr.graph import Op


def with_halos(
    op: Op, parts: Sequence[Any], params: Mapping[str, Any], halos: Sequence[ShardedWindow], ways: Mapping[str, int]
) -> list[Any]:
    """Returns the result of a convolution or a pool on shards, each extended by the rows of its neighbors.

    The gradient of a pool also adds to rows of the neighbors, and returns these to them.
    """
    parts = list(parts)
    padding = list(params["padding"])
    for each in halos:
        array, dim = each.window.read
        parts[array] = _extended(parts[array], dim, each, _neutral(op, parts[array].dtype), ways)
        padding[each.window.index] = each.halo.padding
    results = list(op.bind(parts, {**params, "padding": tuple(padding)}))
    if op.name == POOL_GRADIENT:
        for each in reversed(halos):
            results[0] = _returned(results[0], each.window.read[1], each, ways)
    return results


def _neutral(op: Op, dtype: Any) -> Any:
    """Returns what the padding of a window counts as: zeros of a sum, else what no comparison selects."""
    is_least = op.name == "reduce_window_min" or str(op.params.get("select_prim")) == "le"
    if op.name in ("conv_general_dilated", "reduce_window_sum"):
        return np.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(np.inf if is_least else -np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).max if is_least else jnp.iinfo(dtype).min, dtype)


def _extended(array: Any, dim: int, sharded: ShardedWindow, fill: Any, ways: Mapping[str, int]) -> Any:
    size = array.shape[dim]
    halo = sharded.halo
    arrays = [array]
    if halo.before:
        rows = jax.lax.slice_in_dim(array, size - halo.before, size, axis=dim)
        arrays.insert(0, _from_neighbor(rows, sharded.axes, 1, fill, ways))
    if halo.after:
        rows = jax.lax.slice_in_dim(array, 0, halo.after, axis=dim)
        arrays.append(_from_neighbor(rows, sharded.axes, -1, fill, ways))
    return jnp.concatenate(arrays, dim) if len(arrays) > 1 else array


def _returned(array: Any, dim: int, sharded: ShardedWindow, ways: Mapping[str, int]) -> Any:
    """Returns a shard without its halo, whose rows are added to those of the neighbors."""
    halo = sharded.halo
    end = array.shape[dim] - halo.after
    result = jax.lax.slice_in_dim(array, halo.before, end, axis=dim)
    empty = [(0, 0)] * array.ndim
    size = end - halo.before
    zero = np.zeros((), array.dtype)
    for rows, shift, place in (
        (jax.lax.slice_in_dim(array, 0, halo.before, axis=dim), -1, (size - halo.before, 0)),
        (jax.lax.slice_in_dim(array, end, end + halo.after, axis=dim), 1, (0, size - halo.after)),
    ):
        if rows.shape[dim]:
            moved = _from_neighbor(rows, sharded.axes, shift, zero, ways)
            result = result + jnp.pad(moved, [place if index == dim else none for index, none in enumerate(empty)])
    return result


def _from_neighbor(rows: Any, axes: tuple[str, ...], shift: int, fill: Any, ways: Mapping[str, int]) -> Any:
    """Returns the rows of the device before (1) or after (-1) this one; `fill` where there is none."""
    num_devices = int(np.prod([ways[axis] for axis in axes]))
    pairs = [(device, device + shift) for device in range(num_devices) if 0 <= device + shift < num_devices]
    moved = jax.lax.ppermute(rows, axes, pairs)
    if not np.any(fill):
        return moved
    is_end = jax.lax.axis_index(axes) == (0 if shift == 1 else num_devices - 1)
    return jnp.where(is_end, fill, moved)
