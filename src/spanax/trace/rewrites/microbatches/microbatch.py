"""Evaluates a loss on a subset of the examples, with the constants and the noise of the full batch."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as jex_random

from spanax.trace.jaxpr.graph import Body, Graph, Op
from spanax.trace.jaxpr.interpret import Values, evaluate, read, rebuilt, run
from spanax.trace.rewrites.microbatches.flow import draws, is_changed


@dataclass(frozen=True, eq=False)
class Microbatch:
    """A loss that is evaluated on one microbatch: shapes are those of the microbatch, constants those of the batch.

    Attributes:
      full, small: the loss for the batch and for a microbatch, with the same value numbers.
      index, count: which microbatch it is, of how many.
      batch_size: the number of examples in the batch.
      is_tiled: the layout of noise, as in `Equation`.
    """

    full: Graph
    small: Graph
    index: Any
    count: int
    batch_size: int
    is_tiled: bool

    @cached_property
    def _graph(self) -> Graph:
        shared = {value: const for value, const in self.full.constants.items() if not self._is_sized(value)}
        return replace(self.small, constants=self.small.constants | shared)

    @cached_property
    def _full_ops(self) -> dict[Op, Op]:
        return dict(zip(self.small.ops(), self.full.ops(), strict=True))

    def evaluate(self, results: Sequence[int], values: Values, ahead: Container[int]) -> list[Any]:
        """Returns results, given the inputs and the values that are computed ahead for the full batch."""
        graph = self._graph
        values = dict(values)
        run(graph, graph.slice(results, ahead), values, self._override)
        return read(graph, values, results)

    def _override(self, op: Op, ins: Sequence[Any]) -> list[Any] | None:
        full_op = self._full_ops[op]
        if draws(self.full, self.small, full_op):
            return drawn(full_op, ins, [self._rows(value) for value in op.outputs], self.index, self.count)
        bodies = zip(full_op.bodies, op.bodies, strict=True)
        if not any(is_changed(self.full, self.small, *pair) for pair in bodies):
            return None
        return rebuilt(self.full, op, ins, [partial(self._body, body) for body in op.bodies])

    def _body(self, body: Body, *args: Any) -> list[Any]:
        outs = evaluate(self._graph.within(body), args, self._override)
        avals = [self.small.avals[value] for value in body.outputs]
        return [
            jnp.asarray(out, aval.dtype) if jnp.ndim(out) == 0 and not hasattr(out, "dtype") else out
            for out, aval in zip(outs, avals, strict=True)
        ]

    def _is_sized(self, value: int) -> bool:
        return self.full.shape(value) != self.small.shape(value)

    def _rows(self, value: int) -> tuple[int, int] | None:
        """Returns the example dim of a draw, and the elements per example along it."""
        pairs = enumerate(zip(self.full.shape(value), self.small.shape(value), strict=True))
        dim = next(((dim, size) for dim, (size, small_size) in pairs if size != small_size), None)
        return None if dim is None else (dim[0], 1 if self.is_tiled else dim[1] // self.batch_size)


def rows_of(array: Any, dim: int, inner: int, index: Any, count: int) -> Any:
    """Returns the rows of one microbatch: example `index` of every `count` consecutive examples.

    Args:
      array: has all examples along `dim`.
      dim: the example dim.
      inner: consecutive elements per example along `dim`.
      index: the index of the microbatch.
      count: the number of microbatches.
    """
    shape = jnp.shape(array)
    parts = jnp.reshape(array, (*shape[:dim], shape[dim] // (count * inner), count, inner, *shape[dim + 1 :]))
    group_rows = jax.lax.dynamic_index_in_dim(parts, index, dim + 1, keepdims=False)
    return jnp.reshape(group_rows, (*shape[:dim], shape[dim] // count, *shape[dim + 1 :]))


def drawn(op: Op, ins: Sequence[Any], places: list[tuple[int, int] | None], index: Any, count: int) -> list[Any]:
    """Returns what a random operation of the full batch draws for one microbatch.

    Args:
      op: the operation of the batch.
      ins: its operands.
      places: for each result, its example dim and the elements per example along it; None without examples.
      index: the index of the microbatch.
      count: the number of microbatches.
    """
    place, *_ = places
    params = op.params
    if op.name == "random_bits" and place is not None and _is_counted(ins[0], params, place[0]):
        dim, inner = place
        num_key_dims = jnp.ndim(ins[0])
        draw = partial(
            _bits, shape=params["shape"], bit_width=params["bit_width"], dim=dim - num_key_dims, inner=inner,
            index=index, count=count,
        )  # fmt: skip
        for _ in range(num_key_dims):
            draw = jax.vmap(draw)
        return [draw(ins[0])]
    outs = op.bind(ins)
    pairs = zip(outs, places, strict=True)
    return [out if place is None else rows_of(out, *place, index, count) for out, place in pairs]


def _is_counted(keys: Any, params: dict[str, Any], dim: int) -> bool:
    """Whether each number depends only on its key and its position, with the examples along a dim of the numbers."""
    if dim < jnp.ndim(keys):
        return False
    is_threefry = jax.random.key_impl(keys) == "threefry2x32" and jax.config.jax_threefry_partitionable
    return bool(is_threefry) and params["bit_width"] in (8, 16, 32) and math.prod(params["shape"]) < 2**32


def _bits(key: Any, shape: tuple[int, ...], bit_width: int, dim: int, inner: int, index: Any, count: int) -> Any:
    """Returns the microbatch's rows of `jax.random.bits` for a single key, without generating the others.

    Source: jax, `_threefry_random_bits_partitionable` in jax/_src/prng.py: the counter is the position in the array.
    """
    small = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    counter = jnp.zeros(small, "uint32")
    for axis, size in enumerate(small):
        position = jnp.arange(size, dtype="uint32")
        if axis == dim:
            example = position // inner
            element = position % inner
            position = (example * count + index.astype("uint32")) * inner + element
        stride = math.prod(shape[axis + 1 :])
        shaped = (position * jnp.uint32(stride)).reshape([size if i == axis else 1 for i in range(len(small))])
        counter = counter + shaped
    first, second = jax.random.key_data(key)
    high, low = jex_random.threefry2x32_p.bind(first, second, jnp.zeros_like(counter), counter)
    return (high ^ low).astype(f"uint{bit_width}")
