"""Shards lookups (gather and scatter-add) in a table along the looked-up dim: each device looks up its own rows.

XLA's partitioner supports this except on a mesh with manual axes, where it aborts (`MANUAL_LOOKUPS` in
`plan/sharding/xla_workarounds`). Inside of a pipeline stage the lookup is therefore written with collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spanax.plan.sharding.lookups import LOOKUPS
from spanax.plan.sharding.resolve import Constraint, Spec
from spanax.trace.jaxpr.graph import Graph, Op

ADDING = LOOKUPS - {"gather"}


@dataclass(frozen=True)
class ShardedLookup:
    """Specs of a lookup in a table that is sharded along one looked-up dim.

    `table`, `indices` and `rows` are the specs of the operands and the result; `dim` is the sharded dim and `axes` its
    mesh axes.
    """

    dim: int
    axes: tuple[str, ...]
    table: Spec
    indices: Spec
    rows: Spec


def match_sharded_lookup(
    graph: Graph, op: Op, constraints: Sequence[Constraint | None], manual: frozenset[str]
) -> ShardedLookup | None:
    """Returns the specs of a lookup in a sharded table; None for any other operation."""
    if op.name not in LOOKUPS:
        return None
    is_adding = op.name in ADDING
    numbers = op.params["dimension_numbers"]
    table, rows = (op.outputs[0], op.inputs[2]) if is_adding else (op.inputs[0], op.outputs[0])
    table_spec, row_spec = (_spec(graph, value, constraints, manual) for value in (table, rows))
    columns = numbers.update_window_dims if is_adding else numbers.offset_dims
    dropped = numbers.inserted_window_dims if is_adding else numbers.collapsed_slice_dims
    batching = tuple(numbers.operand_batching_dims)
    index_batching = tuple(numbers.scatter_indices_batching_dims if is_adding else numbers.start_indices_batching_dims)
    sharded_dims = [dim for dim in op.indexed if table_spec[dim]]
    if len(sharded_dims) != 1 or sharded_dims[0] not in dropped:
        return None
    axes = table_spec[sharded_dims[0]]
    row_spec = tuple(tuple(axis for axis in dim_axes if axis not in axes) for dim_axes in row_spec)
    indices = tuple(dim_axes for dim, dim_axes in enumerate(row_spec) if dim not in columns) + ((),)
    window_dims = [dim for dim in range(len(table_spec)) if dim not in dropped and dim not in batching]
    sizes = graph.shape(table)
    spec: list[tuple[str, ...]] = [()] * len(table_spec)
    for dim, column in zip(window_dims, columns, strict=True):
        takes_all = graph.shape(rows)[column] == sizes[dim]
        if row_spec[column] and not takes_all:
            return None
        spec[dim] = row_spec[column]
    for dim, index_dim in zip(batching, index_batching, strict=True):
        spec[dim] = indices[index_dim]
    spec[sharded_dims[0]] = axes
    return ShardedLookup(sharded_dims[0], axes, tuple(spec), indices, row_spec)


def sharded_lookup(
    graph: Graph, op: Op, lookup: ShardedLookup, ins: Sequence[Any], mesh: Mesh, manual: frozenset[str]
) -> list[Any]:
    """Computes a lookup in a sharded table."""
    is_adding = op.name in ADDING
    numbers = op.params["dimension_numbers"]
    component = list(numbers.scatter_dims_to_operand_dims if is_adding else numbers.start_index_map).index(lookup.dim)
    table, indices, rows = (
        PartitionSpec(*(dim_axes or None for dim_axes in spec)) for spec in (lookup.table, lookup.indices, lookup.rows)
    )
    size = graph.shape(op.inputs[0])[lookup.dim]
    batching = {axis for dim in numbers.operand_batching_dims for axis in lookup.table[dim]}
    reduced_axes = tuple(axis for dim_axes in lookup.indices for axis in dim_axes if axis not in batching)

    def local_lookup(operand: Any, indices: Any, *updates: Any) -> Any:
        local = operand.shape[lookup.dim]
        target = indices[..., component]
        if op.params["mode"] == lax.GatherScatterMode.CLIP:
            target = jnp.clip(target, 0, size - 1)
        local_index = target - lax.axis_index(lookup.axes) * local
        is_local = (local_index >= 0) & (local_index < local)
        indices = indices.at[..., component].set(jnp.clip(local_index, 0, local - 1))
        if is_adding:
            (local_updates,) = updates
            local_updates = jnp.where(
                _over_rows(is_local, local_updates.ndim, numbers.update_window_dims), local_updates, 0
            )
            (result,) = op.bind([jnp.zeros_like(operand), indices, local_updates])
            return operand + (lax.psum(result, reduced_axes) if reduced_axes else result)
        sizes = tuple(
            slice_size if slice_size in (0, 1) else min(slice_size, local_size)
            for slice_size, local_size in zip(op.params["slice_sizes"], operand.shape, strict=True)
        )
        (result,) = op.bind([operand, indices], op.params | {"slice_sizes": sizes})
        in_bounds = (target >= 0) & (target < size)
        result = lax.psum(jnp.where(_over_rows(is_local, result.ndim, numbers.offset_dims), result, 0), lookup.axes)
        if op.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
            return result
        outside = jnp.full((), op.params["fill_value"], result.dtype)
        return jnp.where(_over_rows(in_bounds, result.ndim, numbers.offset_dims), result, outside)

    specs = (table, indices, rows) if is_adding else (table, indices)
    names = set(mesh.axis_names) - manual
    function = jax.shard_map(
        local_lookup, in_specs=specs, out_specs=table if is_adding else rows, axis_names=names, check_vma=False
    )
    return [function(*ins)]


def _spec(graph: Graph, value: int, constraints: Sequence[Constraint | None], manual: frozenset[str]) -> Spec:
    constraint = constraints[value]
    if constraint is None:
        return ((),) * len(graph.shape(value))
    return tuple(tuple(axis for axis in dim_axes if axis not in manual) for dim_axes in constraint.computed)


def _over_rows(flags: Any, rank: int, columns: Sequence[int]) -> Any:
    """Broadcasts flags of the lookups to the shape of the rows."""
    return jnp.expand_dims(flags, tuple(columns)) if len(columns) + flags.ndim == rank else flags
