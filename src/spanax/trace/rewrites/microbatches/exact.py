"""Exact gradient accumulation: loss, metrics, gradients and noise equal those of the full batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from spanax.batch_dims import ExampleDims
from spanax.trace.jaxpr.interpret import Values
from spanax.trace.rewrites.chunked_loss.chunked import stack_chunks
from spanax.trace.rewrites.microbatches.decomposition import Decomposition, decomposed
from spanax.trace.rewrites.microbatches.dependence import Kind
from spanax.trace.rewrites.microbatches.support import partition_examples

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Rewrites a loss before differentiation: remat, chunked logits, fused attention."""


def accumulated(
    value: Callable[..., Any],
    transform: Transform,
    args: tuple[Any, Any, Any],
    dims: ExampleDims,
    count: int,
) -> tuple[Any, Any]:
    """Returns the results of a loss and its gradient in the first operand, computed in microbatches.

    If the weight of a sum in the loss depends on the sums, an additional forward pass precedes the gradient.

    Args:
      value: a pure function of trained parameters, other state and batch that returns
        `(loss, (metrics, other state, others))`.
      transform: rewrites the loss before differentiation.
      args: its operands.
      dims: the dim with the examples of each array of the batch.
      count: the number of microbatches.

    Raises:
      SpanaxError: the results of microbatches would differ from those of the full batch.

    Example:
      >>> def loss(weight, rest, batch):
      ...     return ((batch["x"] @ weight) ** 2 * batch["mask"]).sum() / batch["mask"].sum(), ({}, rest, [])
      >>> batch = {"mask": jnp.array([1.0, 0.0, 1.0, 1.0]), "x": jnp.arange(8.0).reshape(4, 2)}
      >>> (value, _), grads = accumulated(loss, lambda term: term, (jnp.ones(2), {}, batch), (0, 0), 2)
      >>> float(value), bool(value == loss(jnp.ones(2), {}, batch)[0])
      (83.66666412353516, True)
    """
    parts = decomposed(value, args, dims, count)
    inputs: Values = dict(zip(parts.full.body.inputs, jax.tree.leaves(args), strict=True))
    inputs |= dict(zip(parts.ahead, parts.evaluated(parts.ahead, inputs), strict=True))
    term = transform(partial(_term, parts))
    loop = partial(_loop, parts, args, dims, inputs)
    weights = partial(_weights, parts, inputs)
    zeros = {number: jnp.zeros(aval.shape, aval.dtype) for number in parts.sums for aval in (parts.full.avals[number],)}
    before = _state_before(parts, args)
    if not parts.is_linear:
        terms_of = lambda *operands: (None, term(*operands)[1])  # noqa: E731
        _, (terms, _) = loop(terms_of, (None, before), {number: zeros[number] for number in parts.weighted})
        zeros = parts.totals(terms)
    first = jax.tree.map(jnp.zeros_like, args[0]), before
    (grads, repeated), (terms, rows) = loop(jax.grad(term, has_aux=True), first, weights(zeros))
    totals = parts.totals(terms)
    stacked = {number: parts.merge_rows(number, array) for number, array in rows.items()}
    outs = parts.evaluated(parts.full.body.outputs, inputs | totals | stacked | repeated)
    if parts.is_direct:
        grads = jax.tree.map(jnp.add, grads, jax.grad(partial(_loss, parts, inputs, totals))(args[0]))
    return jax.tree.unflatten(jax.tree.structure(parts.shapes), outs), grads


def _state_before(parts: Decomposition, args: tuple[Any, Any, Any]) -> Values:
    """Returns, for each repeated result, the state that it replaces."""
    num_before = 1 + len(jax.tree.leaves(parts.shapes[1][0]))
    state = jax.tree.leaves(args[1])
    after = dict(zip(parts.full.body.outputs[num_before : num_before + len(state)], state, strict=True))
    zeros = lambda number: jnp.zeros(parts.full.shape(number), parts.full.avals[number].dtype)  # noqa: E731
    return {number: after[number] if number in after else zeros(number) for number in parts.repeated}


def _weights(parts: Decomposition, inputs: Values, sums: Values) -> Values:
    """Returns the derivative of the loss with respect to each sum."""

    def loss(weighted: Values) -> Any:
        return parts.evaluated([parts.loss], inputs | sums | weighted)[0]

    return jax.lax.stop_gradient(jax.grad(loss)({number: sums[number] for number in parts.weighted}))


def _loss(parts: Decomposition, inputs: Values, totals: Values, params: Any) -> Any:
    """Evaluates the loss as a function of trained parameters, at fixed sums."""
    trained = dict(zip(parts.full.body.inputs, jax.tree.leaves(params), strict=False))
    return parts.evaluated([parts.loss], inputs | trained | totals)[0]


def _term(
    parts: Decomposition, params: Any, rest: Any, weights: Values, ahead: Values, index: Any, rows: tuple[Values, Any]
) -> tuple[Any, tuple[Values, tuple[Values, Values]]]:
    """Returns a microbatch's term of the weighted sum, with its repeated results, terms and rows."""
    values = dict(zip(parts.full.body.inputs, jax.tree.leaves((params, rest, rows[1])), strict=True)) | ahead | rows[0]
    computed = parts.microbatch(values, index)
    terms = [(weights[number] * computed[number]).sum().astype(jnp.float32) for number in parts.weighted]
    sums = {number: computed[number] for number in parts.sums}
    stacked, repeated = (
        {number: computed[number] for number in numbers} for numbers in (parts.stacked, parts.repeated)
    )
    return sum(terms, jnp.float32(0)), (repeated, (sums, stacked))


def _loop(
    parts: Decomposition, args: tuple[Any, Any, Any], dims: ExampleDims, inputs: Values,
    function: Callable[..., Any], first: Any, weights: Values,
) -> tuple[Any, Any]:  # fmt: skip
    """Returns a function's first results summed over microbatches, and its second results stacked."""
    params, rest, batch = args
    kinds = {number: parts.flow.dependence[number] for number in parts.ahead}
    replicated = {number: inputs[number] for number, each in kinds.items() if each.kind is Kind.SAME}
    ahead = {
        number: stack_chunks(inputs[number], kinds[number].dim, parts.count)
        for number in parts.ahead
        if number not in replicated
    }
    examples, merged = partition_examples(batch, dims, parts.count)

    def body(carry: Any, row: tuple[Any, Values, list[Any]]) -> tuple[Any, Any]:
        total, _ = carry
        index, ahead_rows, arrays = row
        new, (repeated, results) = function(params, rest, weights, replicated, index, (ahead_rows, merged(arrays)))
        return (jax.tree.map(jnp.add, total, new), repeated), results

    return jax.lax.scan(body, first, (jnp.arange(parts.count), ahead, examples))
