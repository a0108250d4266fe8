"""Evaluates operations on rows sorted by expert, each device on the rows of its own tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spanax.plan.sharding.sorted_rows import RowSharding
from spanax.trace.jaxpr.graph import Op


def rows_by_device(op: Op, ins: Sequence[Any], rows: RowSharding, mesh: Mesh, manual: frozenset[str]) -> list[Any]:
    """Evaluates an operation on sorted rows; a sum over rows has leading dims, one for each mesh axis of the rows.

    Counts have these leading dims, too. Mesh axes that do not shard rows are left to the compiler.
    """
    axes = rows.axes
    row_op = rows.op

    def spec(array: Any, index: int, dim: int | None) -> PartitionSpec:
        if index == row_op.counts:
            return PartitionSpec(*axes)
        return PartitionSpec(*(axes if each == dim else None for each in range(array.ndim)))

    def on_device(*shards: Any) -> list[Any]:
        parts = list(shards)
        if row_op.counts is not None:
            parts[row_op.counts] = parts[row_op.counts].reshape(parts[row_op.counts].shape[len(axes) :])
        if row_op.column is not None:
            table = parts[0].shape[row_op.inputs[0]]  # type: ignore[index]
            first = (jnp.arange(parts[1].shape[-1]) == row_op.column) * lax.axis_index(axes) * table
            parts[1] = parts[1] - first.astype(parts[1].dtype)
        return [
            jnp.expand_dims(out, range(len(axes))) if dim is None else out
            for out, dim in zip(op.bind(parts), row_op.outputs, strict=True)
        ]

    in_specs = tuple(spec(*each) for each in zip(ins, range(len(ins)), row_op.inputs, strict=True))
    out_specs = [
        PartitionSpec(*axes) if dim is None else PartitionSpec(*(None,) * dim, axes) for dim in row_op.outputs
    ]
    # Where mesh axes are manual already, `shard_map` takes the mesh from its surroundings.
    mesh_argument: dict[str, Any] = {} if manual else {"mesh": mesh}
    mapped = jax.shard_map(
        on_device, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False, **mesh_argument
    )
    return list(mapped(*ins))
