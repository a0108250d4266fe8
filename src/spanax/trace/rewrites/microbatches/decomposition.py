"""Decomposes a loss into sums over examples and a function of those sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from spanax.batch_dims import ExampleDims, num_examples
from spanax.errors import SpanaxError, VariantError
from spanax.trace.jaxpr.graph import CALLS, Graph, Op, from_jaxpr
from spanax.trace.jaxpr.interpret import Values, read, run
from spanax.trace.rewrites.chunked_loss.chunked import is_linear, stack_chunks
from spanax.trace.rewrites.microbatches.flow import Flow, Misaligned, check_aligned
from spanax.trace.rewrites.microbatches.microbatch import Microbatch
from spanax.trace.rewrites.microbatches.rules import EXTREMA, SAME, Dependence, Kind, mixed, rows


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
        results = (*self.sums, *self.stacked, *self.repeated)
        flow = self.flow
        microbatch = Microbatch(self.full, self.small, index, self.count, flow.batch_size, flow.is_tiled)
        computed = microbatch.evaluate(results, values, {*self.ahead})
        return dict(zip(results, computed, strict=True))

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
        for is_tiled in (False, True):
            flow = Flow(full, compared, batch_size, is_tiled, is_outermost=True)
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
        closed, shapes = jax.make_jaxpr(value, return_shape=True)(params, rest, jax.tree.unflatten(treedef, small))
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
