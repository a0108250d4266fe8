"""Computes one position from the caches of the positions before it."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.decoding.derive.bands import ring_positions
from spanax.decoding.derive.fill import Cache
from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.incremental import How, Part, Region, Steps, Want, row_form
from spanax.decoding.derive.windows import row_of
from spanax.trace.jaxpr.dim_maps.registry import TABLE
from spanax.trace.jaxpr.dim_maps.relations import Equation, Family
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.interpret import as_traced, evaluate, run
from spanax.trace.jaxpr.loops import loop_of

Arrays = dict[Want, Any]
"""Arrays by what is wanted of a value."""


def cut(array: Any, rows: Sequence[int], position: Any) -> Any:
    """Returns the row at a position, along each of some dims."""
    for dim in rows:
        array = lax.dynamic_slice_in_dim(array, position, 1, dim)
    return array


def row_shape(shape: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape in which some dims have one row."""
    return tuple(1 if dim in rows else size for dim, size in enumerate(shape))


@dataclass(frozen=True, eq=False)
class Advance:
    """The computation of one position.

    Attributes:
      forward: the forward pass.
      position: the position.
      among_copies: whether regions are computed not alone but for all positions, each with the operands of this one.
      layers: inside loops over layers, their indices, from the outermost.
    """

    forward: Forward
    position: Any
    among_copies: bool = False
    layers: tuple[Any, ...] = ()

    def run(self, steps: Steps, inputs: Mapping[Want, Any], cache: Cache) -> tuple[Arrays, Cache]:
        """Returns what a body computes, and the cache with the rows of this position."""
        arrays = dict(inputs)
        cache = dict(cache)
        for part in steps.parts:
            with nullcontext() if part.op is None else as_traced(part.op):
                arrays |= self._part(part, arrays, cache)
        return arrays, cache

    def read(self, arrays: Mapping[Want, Any], want: Want, size: int = 0) -> Any:
        """Returns a computed array, or rows of a constant; `size` is that of its rings."""
        if want in arrays:
            return arrays[want]
        array = cut(jnp.asarray(self.forward.graph.constants[want.value]), want.rows, self.position)
        for dim in self.forward.positions(want.value) if want.is_ring else ():
            array = array if dim in want.rows else self._latest(array, dim, size)
        return array

    def _part(self, part: Part, arrays: Mapping[Want, Any], cache: Cache) -> Arrays:
        """Returns what a part computes; writes what it caches to `cache`."""
        ins = [] if part.how is How.KEEP else [self.read(arrays, want, part.size) for want in part.operands]
        if part.how is How.LOOP:
            return self._over_layers(part, ins, cache)
        if part.how is How.STATE:
            return self._next_state(part, ins, cache)
        if part.how is How.TOTAL:
            (value,) = part.op.outputs
            (axis,) = part.results[0].rows
            both = lax.concatenate([self._cached(cache, value), ins[0]], axis)
            total = lax.slice_in_dim(part.op.bind([both])[0], 1, 2, axis=axis)
            self._write(cache, value, total)
            return {want: total for want in part.results}
        if part.how is How.CALL:
            return self._called(part, ins, cache)
        if part.how is How.COMPUTE:
            return self._computed(part, ins)
        if part.region is not None:
            return {part.region.result: self._by_region(part.region, ins, cache)}
        (want,) = part.results
        if part.how is How.WINDOW:
            return {want: row_of(part.op, part.windows, ins, want.rows[0], self.position)}
        if part.how is How.CUT:
            return {want: cut(ins[0], want.rows, self.position)}
        if part.how is How.KEEP:
            return {want: self._cached(cache, want.value)}
        (row,) = part.operands[0].rows
        self._write(cache, want.value, jnp.transpose(ins[0], part.order), (part.order.index(row),))
        array = jnp.transpose(self._cached(cache, want.value), [*np.argsort(part.order)])
        # A part may provide all positions and the latest ones; then its first result is all.
        return {
            each: array if each.is_ring == want.is_ring else self._latest(array, row, part.size)
            for each in part.results
        }

    def _write(self, cache: Cache, value: int, array: Any, rows: Sequence[int] = ()) -> None:
        """Writes an array to the cache of a value; along `rows`, to the position, or its row of a ring."""
        cached = cache[value]
        sizes = cached.shape[len(self.layers) :]
        starts = [self.position % size if dim in rows else jnp.int32(0) for dim, size in enumerate(sizes)]
        array = array.astype(cached.dtype).reshape((1,) * len(self.layers) + array.shape)
        cache[value] = lax.dynamic_update_slice(cached, array, [*self.layers, *starts])

    def _cached(self, cache: Cache, value: int) -> Any:
        array = cache[value]
        for layer in self.layers:
            array = lax.dynamic_index_in_dim(array, layer, 0, keepdims=False)
        return array

    def _latest(self, array: Any, dim: int, size: int) -> Any:
        """Returns the rows of a ring of all positions."""
        return jnp.take(array, ring_positions(size, self.position, self.forward.length), axis=dim)

    def _computed(self, part: Part, ins: Sequence[Any]) -> Arrays:
        op = part.op
        want = part.results[0]
        if op.family is Family.IOTA:
            return {want: self._indices(op, want)}
        if not want.rows:
            return dict(zip(part.results, op.bind(ins), strict=True))
        rows = row_form(op, want)
        padding = TABLE[op.name].padding
        assert rows is not None
        assert padding is not None
        equation = Equation(op.eqn)
        shapes = [row_shape(shape, dims) for shape, dims in zip(equation.shapes, rows, strict=True)]
        outs = op.bind(ins, {**op.params, **padding.resized(equation, shapes)})
        return {want: outs[op.outputs.index(want.value)]}

    def _by_region(self, region: Region, ins: Sequence[Any], cache: Cache) -> Any:
        """Returns the row that a region computes."""
        graph = self.forward.graph
        values = dict(zip(region.starts, ins, strict=True))
        if self.among_copies and region.size == 1:
            pairs = zip(region.operands, ins, strict=True)
            values = {want.value: jnp.broadcast_to(array, graph.shape(want.value)) for want, array in pairs}
            run(graph, region.ops, values)
            return cut(values[region.result.value], region.result.rows, self.position)
        for want, start, array in zip(region.operands, region.starts, ins, strict=True):
            if want in region.cached:
                self._write(cache, ~want.value, array, want.rows)
                values[start] = self._cached(cache, ~want.value)
        run(region.block, region.alone, values, partial(self._next_block, region, cache))
        return cut(values[region.end], region.result.rows, self.position % region.size)

    def _next_block(self, region: Region, cache: Cache, op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        """Runs a scan over blocks for one block, from the carry before it; None for other operations."""
        if op not in region.scans:
            return None
        loop = loop_of(self.forward.graph, region.scans[op])
        before = [self._cached(cache, value) for value in loop.body_carried]
        outs = op.bind([*ins[: loop.num_consts], *before, *ins[loop.num_consts + loop.num_carried :]])
        is_last = self.position % region.size == region.size - 1
        for value, old, new in zip(loop.body_carried, before, outs, strict=False):
            self._write(cache, value, jnp.where(is_last, new, old))
        return outs

    def _indices(self, op: Op, want: Want) -> Any:
        """Returns the indices along a dim, which are positions if it has rows, or is that of a ring."""
        dim = op.params["dimension"]
        shape = row_shape(op.params["shape"], want.rows)
        indices = lax.broadcasted_iota(op.params["dtype"], shape, dim)
        if dim in want.rows:
            return indices + self.position.astype(indices.dtype)
        if want.is_ring and shape[dim] != self.forward.graph.shape(want.value)[dim]:
            positions = ring_positions(shape[dim], self.position, self.forward.length).astype(indices.dtype)
            return lax.broadcast_in_dim(positions, shape, (dim,))
        return indices

    def _called(self, part: Part, ins: Sequence[Any], cache: Cache) -> Arrays:
        inside, after = self.run(part.inside, dict(zip(part.inside.inputs, ins, strict=True)), cache)
        cache.update(after)
        outputs = dict(zip(part.op.outputs, part.inside.body.outputs, strict=True))
        return {want: self.read(inside, Want(outputs[want.value], want.rows)) for want in part.results}

    def _next_state(self, part: Part, ins: Sequence[Any], cache: Cache) -> Arrays:
        """Runs one iteration of a scan over positions."""
        loop = loop_of(self.forward.graph, part.op)
        carry = [self._cached(cache, value) for value in loop.body_carried]
        rows = [array[0] for array in ins[loop.num_consts :]]
        outs = evaluate(self.forward.graph.within(loop.body), [*ins[: loop.num_consts], *carry, *rows])
        for value, array in zip(loop.body_carried, outs, strict=False):
            self._write(cache, value, array)
        by_value = dict(zip(part.op.outputs, outs, strict=True))
        return {want: by_value[want.value][None] for want in part.results}

    def _over_layers(self, part: Part, ins: Sequence[Any], cache: Cache) -> Arrays:
        """Runs a scan over layers; its carry is the rows, and the caches of its layers, which it updates in place."""
        steps = part.inside
        loop = loop_of(self.forward.graph, part.op)
        others = [want for want in steps.inputs if want.value not in loop.body_carried]
        given = dict(zip(others, ins[len(part.slots) :], strict=True))
        scanned = {want: array for want, array in given.items() if want.value in loop.body_scanned}
        consts = {want: array for want, array in given.items() if want not in scanned}
        slots = [Want(loop.body_carried[index], rows) for index, rows in part.slots]
        ends = [Want(loop.body.outputs[index], rows) for index, rows in part.slots]
        stacked = [want for want in part.results if want.value in loop.stacked]
        inner = dict(zip(part.op.outputs, loop.body.outputs, strict=True))
        tops = [Want(inner[want.value], tuple(row - 1 for row in want.rows)) for want in stacked]

        def layer(carry: Any, rows: Any) -> Any:
            current, caches = carry
            index, parts = rows
            here = replace(self, layers=(*self.layers, index))
            inputs = consts | dict(zip(scanned, parts, strict=True)) | dict(zip(slots, current, strict=True))
            arrays, caches = here.run(steps, inputs, caches)
            return ([here.read(arrays, want) for want in ends], caches), [here.read(arrays, want) for want in tops]

        names = cached_values(self.forward, steps)
        indices = jnp.arange(part.op.params["length"], dtype=jnp.int32)
        start = ins[: len(part.slots)], {name: cache[name] for name in names}
        rows = indices, list(scanned.values())
        (current, caches), parts = lax.scan(layer, start, rows, reverse=part.op.params["reverse"])
        cache.update(caches)
        last = {Want(loop.results[index], dims): row for (index, dims), row in zip(part.slots, current, strict=True)}
        return last | dict(zip(stacked, parts, strict=True))


def cached_values(forward: Forward, steps: Steps) -> list[int]:
    """Returns the values that the steps of a body cache, in it and in the bodies inside."""
    values = [part.results[0].value for part in steps.of(How.CACHE, How.KEEP, How.TOTAL)]
    for part in steps.of(How.STATE):
        values += loop_of(forward.graph, part.op).body_carried
    for part in steps.parts:
        if part.region is not None:
            values += [~want.value for want in part.region.cached]
            for op in part.region.scans.values():
                values += loop_of(forward.graph, op).body_carried
    for part in steps.of(How.LOOP, How.CALL):
        values += cached_values(forward, part.inside)
    return values
