"""Evaluates operations on rows sorted by expert, each device on the rows of its own tokens or experts.

Where experts stay on their devices, each of these devices sorts the rows of its own experts first. Its other rows are
those of other devices: indices for them are beyond every table, so that nothing is added for them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spanax.plan.sharding.sorted_rows import RowSharding
from spanax.step.replay.sent_rows import add_rows, read_rows
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import RAGGED, Op

Axes = tuple[str, ...]


def rows_by_device(op: Op, ins: Sequence[Any], rows: RowSharding, mesh: Mesh, manual: frozenset[str]) -> list[Any]:
    """Evaluates an operation on sorted rows.

    What differs between devices with other experts has a leading dim for each of their mesh axes, and so have counts
    and sums for those over which they are to be added. Mesh axes that shard neither rows nor experts are left to the
    compiler.
    """
    row_op = rows.op
    num_inputs = len(op.inputs)
    leading = [rows.staying if varies else () for varies in rows.varying]
    leading = [rows.axes if index == row_op.counts else axes for index, axes in enumerate(leading)]
    leading[num_inputs:] = [rows.summed or axes for axes in leading[num_inputs:]]
    dims = [*row_op.inputs, *row_op.outputs]
    by = [(*rows.axes, *rows.staying) if index in rows.tokens else rows.axes for index in range(len(dims))]
    specs = [_spec(axes, dim, each) for axes, dim, each in zip(leading, dims, by, strict=True)]
    if op.name == RAGGED and rows.staying:
        groups = op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        if groups:
            specs[1] = _spec((), groups[0], rows.staying)
        else:
            specs[num_inputs] = _spec(leading[num_inputs], 0, rows.staying)

    # Instead of `lax.axis_index`: where other mesh axes are left to XLA, it refuses PartitionId in models called twice.
    over = (rows.axes, rows.staying)
    numbers = [jnp.arange(math.prod(mesh.shape[axis] for axis in axes), dtype=jnp.int32) for axes in over]

    def part(first: Any, second: Any, *shards: Any) -> list[Any]:
        on_device = _OnDevice(op, rows, mesh.shape, {rows.axes: first[0], rows.staying: second[0]})
        pairs = zip(shards, leading[:num_inputs], strict=True)
        outs = on_device.results([shard.reshape(shard.shape[len(axes) :]) for shard, axes in pairs])
        return [jnp.expand_dims(out, range(len(axes))) for out, axes in zip(outs, leading[num_inputs:], strict=True)]

    # Where mesh axes are manual already, `shard_map` takes the mesh from its surroundings.
    mesh_argument: dict[str, Any] = {} if manual else {"mesh": mesh}
    mapped = jax.shard_map(
        part,
        in_specs=(*map(PartitionSpec, over), *specs[:num_inputs]),
        out_specs=specs[num_inputs:],
        # What is sent has no shards along other axes, and compilers partition no ragged exchange.
        axis_names={*mesh.axis_names} - manual if rows.tokens else {*rows.axes, *rows.staying},
        check_vma=False,
        **mesh_argument,
    )
    return list(mapped(*numbers, *ins))


def _spec(leading: Axes, dim: int | None, axes: Axes) -> PartitionSpec:
    return PartitionSpec(*leading, *(() if dim is None or not axes else (*(None,) * dim, axes)))


@dataclass(frozen=True)
class _OnDevice:
    """An operation on the rows of one device; `ways` are the sizes of the mesh axes, `index` its place along some."""

    op: Op
    rows: RowSharding
    ways: Mapping[str, int]
    index: Mapping[Axes, Any]

    def results(self, parts: list[Any]) -> list[Any]:
        """Returns its results, of operands without leading dims."""
        op = self.op
        row_op = self.rows.op
        if row_op.column is not None:
            table = parts[0].shape[row_op.inputs[0]]  # type: ignore[index]
            is_row = jnp.arange(parts[1].shape[-1], dtype=parts[1].dtype) == row_op.column
            table *= self.num_devices if 0 in self.rows.tokens else 1
            parts[1] = parts[1] - is_row * self.index[self.rows.axes].astype(parts[1].dtype) * table
        if not any(self.rows.varying) and op.name != RAGGED:
            outs = op.bind(parts)
            return [lax.psum(out, self.rows.staying) for out in outs] if self.rows.tokens else outs
        if self.rows.tokens:
            return [self._sent(parts)]
        if op.name == "sort":
            return self._sorted(parts) if row_op.beyond else self._places(parts)
        if op.name == RAGGED:
            return self._multiplied(parts)
        return self._looked_up(parts) if op.family is Family.GATHER else self._added(parts)

    def _multiplied(self, parts: Sequence[Any]) -> list[Any]:
        """Multiplies the first rows, among which are all of the experts of this device; results of others are zeros."""
        row_op = self.rows.op
        pairs = [(part, dim) for part, dim in zip(parts, row_op.inputs, strict=True) if dim is not None]
        number = pairs[0][0].shape[pairs[0][1]]
        first = math.ceil(number * self.rows.share)
        some = [
            part if dim is None else lax.slice_in_dim(part, 0, first, axis=dim)
            for part, dim in zip(parts, row_op.inputs, strict=True)
        ]
        some[2] = self._own(parts[2]) if self.rows.staying else parts[2]
        (out,) = self.op.bind(some)
        (dim,) = row_op.outputs
        if dim is None or first == number:
            return [out]
        padding = [(0, number - first if each == dim else 0, 0) for each in range(out.ndim)]
        return [lax.pad(out, jnp.zeros((), out.dtype), padding)]

    def _sent(self, parts: Sequence[Any]) -> Any:
        """Reads or adds to rows of tokens or choices, of the devices that have them.

        Where the indices are those of sorted rows, for each choice, each row has the choice as its address.
        """
        is_read = self.op.family is Family.GATHER
        table = parts[0]
        indices = parts[1].reshape(-1)
        shape = table.shape[1:]
        axes = self.rows.staying
        num_asked = len(indices) // self.num_devices
        if 0 in self.rows.tokens:
            if is_read:
                out = read_rows(table, indices, num_asked, axes)
                return out.reshape(*parts[1].shape[:-1], *shape)
            return add_rows(table, parts[2].reshape(-1, *shape), indices, num_asked, axes)
        numbers = jnp.arange(len(indices), dtype=indices.dtype)
        addresses = jnp.full(len(table), len(indices), indices.dtype).at[indices].set(numbers, mode="drop")
        if not is_read:
            return table + read_rows(parts[2].reshape(-1, *shape), addresses, num_asked, axes)
        out = add_rows(jnp.zeros((num_asked, *shape), table.dtype), table, addresses, num_asked, axes)
        return out.reshape(-1, *parts[1].shape[1:-1], *shape)

    @property
    def num_devices(self) -> int:
        """The number of devices with different experts."""
        return math.prod(self.ways[axis] for axis in self.rows.staying)

    def _own(self, counts: Any) -> Any:
        """Returns the counts of the experts of this device."""
        number = counts.shape[0] // self.num_devices
        return lax.dynamic_slice_in_dim(counts, self.index[self.rows.staying] * number, number)

    def _sorted(self, parts: Sequence[Any]) -> list[Any]:
        """Sorts the rows of the experts of this device before all others."""
        beyond = self.rows.op.beyond
        keys = parts[0]
        number = (beyond[0] or 0) // self.num_devices
        first = self.index[self.rows.staying].astype(keys.dtype) * number
        is_own = (keys >= first) & (keys < first + number)
        known = [
            part if element is None else jnp.where(is_own, part, jnp.asarray(element, part.dtype))
            for part, element in zip(parts, beyond, strict=True)
        ]
        order = jnp.where(is_own, keys, jnp.iinfo(keys.dtype).max)
        return list(lax.sort([order, *known], num_keys=1, is_stable=self.op.params["is_stable"])[1:])

    def _places(self, parts: Sequence[Any]) -> list[Any]:
        """Returns where the row of each choice is; beyond all rows for those of other devices."""
        order, places = parts
        first = self.index[self.rows.axes].astype(order.dtype) * len(order)
        num_rows = len(order) * math.prod(self.ways[axis] for axis in self.rows.axes)
        return [order, jnp.full_like(places, num_rows).at[order - first].set(places, mode="drop")]

    def _looked_up(self, parts: Sequence[Any]) -> list[Any]:
        """Looks up rows; of what is a sum over devices, zeros for the rows of others."""
        table, indices = parts[:2]
        numbers = self.op.params["dimension_numbers"]
        dims = numbers.start_index_map
        last = jnp.array([table.shape[dim] - self.op.params["slice_sizes"][dim] for dim in dims], indices.dtype)
        (out,) = self.op.bind([table, jnp.clip(indices, 0, last), *parts[2:]])
        if not self.rows.summed:
            return [out]
        is_own = (indices <= last).all(-1)
        shape = [1 if dim in numbers.offset_dims else size for dim, size in enumerate(out.shape)]
        return [jnp.where(is_own.reshape(shape), out, jnp.zeros((), out.dtype))]

    def _added(self, parts: Sequence[Any]) -> list[Any]:
        """Adds rows to a table, of which all devices but one have zeros if the result is a sum."""
        table = parts[0]
        if self.rows.summed:
            is_first = self.index[self.rows.staying] == 0
            table = jnp.where(is_first, table, jnp.zeros((), table.dtype))
        changed = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "unique_indices": False, "indices_are_sorted": False}
        return self.op.bind([table, *parts[1:]], {**self.op.params, **changed})
