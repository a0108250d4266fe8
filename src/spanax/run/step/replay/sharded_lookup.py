"""Lookup: rows of a table that is split along what is looked up, found by each device for the rows it has.

XLA's partitioner does this well on its own, but for a mesh of which an axis is split by hand: there it dies
(`MANUAL_LOOKUPS` in `plan/sharding/xla_workarounds`). So inside of a pipeline it is done here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spanax.plan.sharding.operands import LOOKUPS
from spanax.plan.sharding.resolve import Constraint, Spec
from spanax.trace.jaxpr.graph import Graph, Op

ADDING = LOOKUPS - {"gather"}


@dataclass(frozen=True)
class SplitLookup:
    """A lookup in a table of which one looked-up dim is split.

    `table`, `indices` and `rows` are the specs of the three; `dim` is the split one, `axes` split it.
    """

    dim: int
    axes: tuple[str, ...]
    table: Spec
    indices: Spec
    rows: Spec


def split_lookup(
    graph: Graph, op: Op, constraints: Sequence[Constraint | None], manual: frozenset[str]
) -> SplitLookup | None:
    """How a lookup goes over a split table; None of any other operation."""
    if op.name not in LOOKUPS:
        return None
    is_adding = op.name in ADDING
    numbers = op.params["dimension_numbers"]
    table, rows = (op.outputs[0], op.inputs[2]) if is_adding else (op.inputs[0], op.outputs[0])
    of_table, of_rows = (_spec(graph, value, constraints, manual) for value in (table, rows))
    looked_up = numbers.scatter_dims_to_operand_dims if is_adding else numbers.start_index_map
    columns = numbers.update_window_dims if is_adding else numbers.offset_dims
    left_out = numbers.inserted_window_dims if is_adding else numbers.collapsed_slice_dims
    batching = tuple(numbers.operand_batching_dims)
    asking = tuple(numbers.scatter_indices_batching_dims if is_adding else numbers.start_indices_batching_dims)
    split = [dim for dim in looked_up if of_table[dim]]
    if len(split) != 1 or split[0] not in left_out:
        return None
    axes = of_table[split[0]]
    of_rows = tuple(tuple(axis for axis in by if axis not in axes) for by in of_rows)
    indices = tuple(by for dim, by in enumerate(of_rows) if dim not in columns) + ((),)
    kept = [dim for dim in range(len(of_table)) if dim not in left_out and dim not in batching]
    sizes = graph.shape(table)
    spec = [()] * len(of_table)
    for dim, column in zip(kept, columns, strict=True):
        whole = graph.shape(rows)[column] == sizes[dim]
        if of_rows[column] and not whole:
            return None
        spec[dim] = of_rows[column]
    for dim, asked in zip(batching, asking, strict=True):
        spec[dim] = indices[asked]
    spec[split[0]] = axes
    return SplitLookup(split[0], axes, tuple(spec), indices, of_rows)


def look_up(
    graph: Graph, op: Op, how: SplitLookup, ins: Sequence[Any], mesh: Mesh, manual: frozenset[str]
) -> list[Any]:
    """The results of a lookup over a split table."""
    is_adding = op.name in ADDING
    numbers = op.params["dimension_numbers"]
    at = list(numbers.scatter_dims_to_operand_dims if is_adding else numbers.start_index_map).index(how.dim)
    table, indices, rows = (PartitionSpec(*(by or None for by in spec)) for spec in (how.table, how.indices, how.rows))
    size = graph.shape(op.inputs[0])[how.dim]
    batching = {axis for dim in numbers.operand_batching_dims for axis in how.table[dim]}
    over = tuple(axis for by in how.indices for axis in by if axis not in batching)

    def part(operand: Any, indices: Any, *updates: Any) -> Any:
        local = operand.shape[how.dim]
        asked = indices[..., at]
        if op.params["mode"] == lax.GatherScatterMode.CLIP:
            asked = jnp.clip(asked, 0, size - 1)
        here = asked - lax.axis_index(how.axes) * local
        is_here = (here >= 0) & (here < local)
        indices = indices.at[..., at].set(jnp.clip(here, 0, local - 1))
        if is_adding:
            (added,) = updates
            added = jnp.where(_over_rows(is_here, added.ndim, numbers.update_window_dims), added, 0)
            (found,) = op.bind([jnp.zeros_like(operand), indices, added])
            return operand + (lax.psum(found, over) if over else found)
        sizes = tuple(
            whole if whole in (0, 1) else min(whole, there)
            for whole, there in zip(op.params["slice_sizes"], operand.shape, strict=True)
        )
        (found,) = op.bind([operand, indices], op.params | {"slice_sizes": sizes})
        is_there = (asked >= 0) & (asked < size)
        found = lax.psum(jnp.where(_over_rows(is_here, found.ndim, numbers.offset_dims), found, 0), how.axes)
        if op.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
            return found
        outside = jnp.full((), _fill(op, found.dtype), found.dtype)
        return jnp.where(_over_rows(is_there, found.ndim, numbers.offset_dims), found, outside)

    specs = (table, indices, rows) if is_adding else (table, indices)
    names = set(mesh.axis_names) - manual
    function = jax.shard_map(
        part, in_specs=specs, out_specs=table if is_adding else rows, axis_names=names, check_vma=False
    )
    return [function(*ins)]


def _spec(graph: Graph, value: int, constraints: Sequence[Constraint | None], manual: frozenset[str]) -> Spec:
    lies = constraints[value]
    if lies is None:
        return ((),) * len(graph.shape(value))
    return tuple(tuple(axis for axis in by if axis not in manual) for by in lies.computed)


def _over_rows(flags: Any, rank: int, columns: Sequence[int]) -> Any:
    """Flags of what was asked, as the rows are laid out."""
    return jnp.expand_dims(flags, tuple(columns)) if len(columns) + flags.ndim == rank else flags


def _fill(op: Op, dtype: Any) -> Any:
    """What stands for a row that is not in the table."""
    given = op.params.get("fill_value")
    if given is not None:
        return given
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
