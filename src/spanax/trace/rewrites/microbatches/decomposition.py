"""Decomposes a loss into sums over examples and a function of those sums, and evaluates it on some of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as jex_random

from spanax.batch_dims import ExampleDims, num_examples
from spanax.errors import SpanaxError, VariantError
from spanax.trace.analysis.sorted_rows import SortedRows, sorted_rows
from spanax.trace.jaxpr.graph import CALLS, Body, Graph, Op, from_jaxpr
from spanax.trace.jaxpr.interpret import Values, evaluate, read, rebuilt, run
from spanax.trace.jaxpr.linear import is_linear
from spanax.trace.rewrites.chunked_loss import stack_chunks
from spanax.trace.rewrites.microbatches.flow import Flow, Misaligned, check_aligned, draws, is_changed
from spanax.trace.rewrites.microbatches.rules import EXTREMA, SAME, Dependence, Kind, mixed, rows
from spanax.trace.rewrites.traced_once import jaxpr_of


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
            _bits,
            shape=params["shape"],
            bit_width=params["bit_width"],
            dim=dim - num_key_dims,
            inner=inner,
            index=index,
            count=count,
        )
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


@dataclass(frozen=True, eq=False)
class Decomposition:
    """A loss whose results are functions of sums over examples, or have a row for each example.

    Values are numbered as in `full`, the loss for the full batch; the first of `outputs` is the loss.

    Attributes:
      full, small: the loss for the full batch and for one of `count` microbatches.
      shapes: the results of the loss for the batch, as `jax.eval_shape` returns them.
      flow: the dependence of each value on the examples.
      count: the number of microbatches.
      sums: values that are sums over examples, of which all other results are functions.
      stacked: results that have a row for each example.
      repeated: results that are equal in all microbatches but depend on rows (a count of draws).
      ahead: values that are computed for the full batch before the microbatches.
    """

    full: Graph
    small: Graph
    shapes: Any
    flow: Flow
    count: int
    sums: tuple[int, ...]
    stacked: tuple[int, ...]
    repeated: tuple[int, ...]
    ahead: tuple[int, ...]

    @property
    def loss(self) -> int:
        """The value of the loss."""
        return self.full.body.outputs[0]

    @cached_property
    def weighted(self) -> tuple[int, ...]:
        """The sums with respect to which the loss has a gradient."""
        needed = {value for op in self.loss_ops for value in op.inputs} | {self.loss}
        is_smooth = lambda value: jnp.issubdtype(self.full.avals[value].dtype, jnp.inexact)  # noqa: E731
        return tuple(value for value in self.sums if value in needed and is_smooth(value))

    @cached_property
    def loss_ops(self) -> list[Op]:
        """The operations that compute the loss from the sums."""
        return self.full.slice([self.loss], self.sums)

    @cached_property
    def is_linear(self) -> bool:
        """Whether the loss is linear in the sums, so that their weights do not depend on them."""
        after = {value for value, each in self.flow.dependence.items() if each.kind is Kind.TOTAL} | {*self.sums}
        return is_linear(self.loss_ops, after, self.loss)

    @cached_property
    def is_direct(self) -> bool:
        """Whether the loss depends on trained parameters other than through the sums (weight decay in the loss)."""
        read = {value for op in self.loss_ops for value in op.inputs} | {self.loss}
        operands = read - {value for op in self.loss_ops for value in op.outputs} - {*self.sums}
        return any(self.flow.dependence[value].is_trained for value in operands)

    def microbatch(self, values: Values, index: Any) -> Values:
        """Evaluates one microbatch; returns the terms of the sums, and rows and repeated results.

        Args:
          values: the inputs for the microbatch, and the values computed ahead.
          index: which microbatch it is.
        """
        graph = self._microbatch
        results = (*self.sums, *self.stacked, *self.repeated)
        values = dict(values)
        run(graph, graph.slice(results, {*self.ahead}), values, partial(self._override, index))
        return dict(zip(results, read(graph, values, results), strict=True))

    @cached_property
    def _microbatch(self) -> Graph:
        """The loss for a microbatch, with the constants of the batch where their shapes are equal."""
        shared = {v: const for v, const in self.full.constants.items() if self.full.shape(v) == self.small.shape(v)}
        return replace(self.small, constants=self.small.constants | shared)

    @cached_property
    def _full_ops(self) -> dict[Op, Op]:
        return dict(zip(self.small.ops(), self.full.ops(), strict=True))

    def _override(self, index: Any, op: Op, ins: Sequence[Any]) -> list[Any] | None:
        full_op = self._full_ops[op]
        if draws(self.full, self.small, full_op):
            return drawn(full_op, ins, [self._rows(value) for value in op.outputs], index, self.count)
        bodies = zip(full_op.bodies, op.bodies, strict=True)
        if not any(is_changed(self.full, self.small, *pair) for pair in bodies):
            return None
        return rebuilt(self.full, op, ins, [partial(self._body, index, body) for body in op.bodies])

    def _body(self, index: Any, body: Body, *args: Any) -> list[Any]:
        outs = evaluate(self._microbatch.within(body), args, partial(self._override, index))
        avals = [self.small.avals[value] for value in body.outputs]
        return [
            jnp.asarray(out, aval.dtype) if jnp.ndim(out) == 0 and not hasattr(out, "dtype") else out
            for out, aval in zip(outs, avals, strict=True)
        ]

    def _rows(self, value: int) -> tuple[int, int] | None:
        """Returns the example dim of a draw, and the elements per example along it."""
        pairs = enumerate(zip(self.full.shape(value), self.small.shape(value), strict=True))
        dim = next(((dim, size) for dim, (size, small_size) in pairs if size != small_size), None)
        return None if dim is None else (dim[0], 1 if self.flow.is_tiled else dim[1] // self.flow.batch_size)

    def evaluated(self, outputs: Sequence[int], values: Values) -> list[Any]:
        """Evaluates outputs for the full batch, given its inputs and the sums."""
        values = dict(values)
        run(self.full, self.full.slice(outputs, values), values)
        return read(self.full, values, outputs)

    def totals(self, terms: Values) -> Values:
        """Combines the stacked terms of all microbatches into sums, maxima and minima over the batch."""
        kinds = self.flow.dependence
        return {
            value: EXTREMA[self.full.producers[value].name](parts, 0)
            if kinds[value].kind is Kind.EXTREME
            else parts.sum(0, dtype=parts.dtype)
            for value, parts in terms.items()
        }

    def merge_rows(self, value: int, parts: Any) -> Any:
        """Interleaves the stacked rows of all microbatches into the rows of the full batch."""
        each = self.flow.dependence[value]
        inner = each.inner or 1
        shape = jnp.shape(parts)[1:]
        grouped = jnp.reshape(parts, (self.count, *shape[: each.dim], -1, inner, *shape[each.dim + 1 :]))
        return jnp.moveaxis(grouped, 0, each.dim + 1).reshape(self.full.shape(value))


def decomposed(value: Callable[..., Any], args: tuple[Any, Any, Any], dims: ExampleDims, count: int) -> Decomposition:
    """Returns the decomposition of a loss over microbatches.

    Args:
      value: a function of trained parameters, other state and batch; its first result is the loss.
      args: its operands for the full batch.
      dims: the dim with the examples of each array of the batch.
      count: the number of microbatches, which divides the number of examples.

    Raises:
      SpanaxError: results depend on several examples other than through sums over the batch.
    """
    batch_size = num_examples([leaf.shape for leaf in jax.tree.leaves(args[2])], dims)
    full, shapes = _traced(value, args, dims, 1)
    small, _ = _traced(value, args, dims, count)
    inputs = [SAME.trained(True)] * len(jax.tree.leaves(args[0])) + [SAME] * len(jax.tree.leaves(args[1]))
    inputs += [SAME if dim is None else rows(dim) for dim in dims]
    # JAX special-cases dims of size 1, so microbatches of one example are analyzed at a larger size.
    fewer = max((each for each in range(1, count) if batch_size % each == 0), default=1)
    is_single = batch_size == count and fewer > 1
    compared = _traced(value, args, dims, fewer)[0] if is_single else small
    try:
        check_aligned(full, small, ranks=not is_single)
        check_aligned(full, compared)
        found = [sorted_rows(graph) for graph in (full, compared)]
        is_sorted = [*map(len, (found[0].ops, found[0].dims))] == [*map(len, (found[1].ops, found[1].dims))]
        for is_tiled in (False, True):
            rows_of_experts = found[0] if is_sorted else SortedRows()
            flow = Flow(full, compared, batch_size, is_tiled, is_outermost=True, sorted=rows_of_experts)
            outs = flow.run(inputs)
            if all(out.kind is not Kind.MIXED for out in outs):
                break
    except Misaligned:
        raise _of_another_size(batch_size, count) from None
    _check_exact(outs)
    parts = Decomposition(full, small, shapes, flow, count, **_results_of(full, flow))
    extremes = [number for number in parts.weighted if flow.dependence[number].kind is Kind.EXTREME]
    _check_exact([mixed(full.producers[number]) for number in extremes])
    return parts


def _traced(value: Callable[..., Any], args: tuple[Any, Any, Any], dims: ExampleDims, count: int) -> tuple[Graph, Any]:
    """Traces a loss for one of `count` microbatches; returns its equations and the shapes of its results.

    Raises:
      SpanaxError: the loss cannot be traced at that number of examples.
    """
    params, rest, batch = args
    leaves, treedef = jax.tree.flatten(batch)
    # Under an Explicit mesh the examples of a microbatch are sharded as those of the batch.
    part = lambda leaf, dim: jax.eval_shape(lambda array: stack_chunks(array, dim, count)[0], leaf)  # noqa: E731
    small = [leaf if dim is None else part(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
    try:
        closed, shapes = jaxpr_of(value, params, rest, jax.tree.unflatten(treedef, small))
    except Exception as error:
        if count == 1:
            raise
        raise _of_another_size(num_examples([leaf.shape for leaf in leaves], dims), count) from error
    return from_jaxpr(closed, CALLS, as_traced=True), shapes


def _of_another_size(batch_size: int, count: int) -> SpanaxError:
    return VariantError(
        f"the loss traces to another program for {batch_size // count} examples than for the batch of {batch_size}.",
        where=f"{count} microbatches",
        fix="sizes from the shapes of the batch, fewer microbatches, or microbatches=1",
    )


def _results_of(full: Graph, flow: Flow) -> dict[str, tuple[int, ...]]:
    """Returns the values of a decomposition by attribute name."""
    kind = lambda value: flow.dependence[value].kind  # noqa: E731
    sums: dict[int, None] = {}
    stacked = {value for value in full.body.outputs if kind(value) is Kind.ROWS and value not in flow.ahead}
    stack = [value for value in full.body.outputs if value not in stacked]
    seen = set[int]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if kind(value) in (Kind.PARTIAL, Kind.EXTREME):
            sums[value] = None
        elif kind(value) is Kind.TOTAL:
            stack.extend(full.producers[value].inputs)

    def has_rows(value: int) -> bool:
        needed = full.slice([value], flow.ahead)
        return any(kind(operand) is Kind.ROWS for op in needed for operand in op.inputs)

    repeated = {
        operand
        for operand in full.body.outputs
        if kind(operand) is Kind.SAME and operand not in flow.ahead and has_rows(operand)
    }
    ordered = {"sums": sums, "stacked": stacked, "repeated": repeated}
    return {name: tuple(sorted(values)) for name, values in ordered.items()} | {"ahead": tuple(flow.ahead)}


def _check_exact(outs: Sequence[Dependence]) -> None:
    cause = next((out.cause for out in outs if out.kind is Kind.MIXED), None)
    if any(out.kind is Kind.MIXED for out in outs):
        name, where = ("a constant", "") if cause is None else (f"`{cause.name}`", cause.where)
        raise VariantError(
            f"microbatches would change the loss: {name} combines examples of the full batch.",
            where=where,
            fix='microbatches=1 and no pipeline, or accumulate="mean" for the mean over microbatches',
        )
