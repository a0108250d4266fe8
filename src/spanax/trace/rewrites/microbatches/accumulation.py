"""Gradient accumulation over microbatches: exact or as a mean, and whether a loss supports it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spanax.batch_dims import ExampleDims, num_examples
from spanax.errors import SpanaxError, VariantError, first_line
from spanax.trace.axes.discover import joined
from spanax.trace.axes.example_dims import example_dims, scanned_dims
from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.jaxpr.interpret import Values
from spanax.trace.jaxpr.remat_policies import GATHERED, MEAN
from spanax.trace.rewrites.chunked_loss import stack_chunks
from spanax.trace.rewrites.matmul_dtype import MatmulDtypes
from spanax.trace.rewrites.microbatches.decomposition import Decomposition, decomposed
from spanax.trace.rewrites.microbatches.rules import Kind
from spanax.trace.rewrites.pure_loss import check_unmoved, pure_loss
from spanax.trace.rewrites.traced_once import TracedLoss, TracedOnce, jaxpr_of
from spanax.trace.variables import Leaf


@dataclass(frozen=True)
class Microbatches:
    """The support of a train step for microbatches.

    Attributes:
      num_passes: evaluations of the loss per microbatch; 2 if the weights of its sums depend on the sums.
      error: why the results would differ from those of the full batch; None if they are equal or need not be.
    """

    num_passes: int = 1
    error: SpanaxError | None = None


def microbatches_of(
    loss: Callable[..., Any] | None,
    dtypes: MatmulDtypes,
    accumulate: str,
    trace: Callable[..., Any],
    batch_axes: ExampleDims | None,
    traced: TracedLoss,
) -> Microbatches:
    """Returns whether a train step supports microbatches.

    Args:
      loss: the user's loss; None if the user wrote the train step.
      dtypes: those in which the loss computes its matmuls.
      accumulate: how microbatches are combined, one of `ACCUMULATIONS`.
      trace: evaluates a train step abstractly.
      batch_axes: the dim with the examples of each array of the batch, if the user says it.
      traced: what was traced of the loss in this dtype.
    """
    if loss is None:
        error = VariantError(
            "a user-defined `train_step` does not run in microbatches.", fix="loss= and no train_step="
        )
        return Microbatches(error=error)
    if accumulate == MEAN:
        return Microbatches()
    passes: list[int] = []

    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        value, params, rest = pure_loss(loss, dtypes, model, optimizer)
        value = TracedOnce(value, traced.known[GATHERED])
        operands = params, rest, batch
        dims = examples(value, operands, 1, batch_axes)
        size = num_examples([leaf.shape for leaf in jax.tree.leaves(batch)], dims)
        count = next((count for count in range(2, size + 1) if size % count == 0), 1)
        parts = decomposed(value, operands, dims, count)
        check_unmoved(params, parts.shapes[1][2], count)
        passes.append(1 if parts.is_linear else 2)
        return {}

    try:
        trace(step)
    except SpanaxError as error:
        return Microbatches(error=error)
    # An equation that the analysis does not support must not prevent a plan without microbatches.
    except Exception as error:
        what = f"the loss cannot be analyzed for microbatches: {type(error).__name__}: {first_line(error)}"
        return Microbatches(error=VariantError(what, fix='microbatches=1 and no pipeline, or accumulate="mean"'))
    return Microbatches(passes[-1])


def examples(
    value: Callable[..., Any], operands: tuple[Any, Any, Any], count: int, batch_axes: ExampleDims | None = None
) -> ExampleDims:
    """Returns the dim with the examples of each array of the batch.

    Args:
      value: the loss, as `pure_loss` returns it.
      operands: trained parameters, other state, and batch.
      count: the number of microbatches.
      batch_axes: the dims, if the user says them; by default, as the loss uses them.

    Raises:
      SpanaxError: `count` does not divide the number of examples.
    """
    dims = _used(value, operands) if batch_axes is None else batch_axes
    check_divides(num_examples([array.shape for array in jax.tree.leaves(operands[2])], dims), count)
    return dims


def _used(value: Callable[..., Any], operands: tuple[Any, Any, Any]) -> ExampleDims:
    graph = from_jaxpr(jaxpr_of(value, *operands)[0])
    dims = joined(graph, scanned_dims(graph))
    params, rest, batch = (jax.tree.leaves(tree) for tree in operands)
    leaves = [Leaf("", array.shape, array.dtype, "param") for array in params]
    leaves += [Leaf("", jax.numpy.shape(array), None, "other") for array in rest]
    return example_dims(dims, leaves, [Leaf("", array.shape, array.dtype, "batch") for array in batch])


def partition_examples(batch: Any, dims: ExampleDims, count: int) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays of a batch that have examples, stacked in chunks, and a function from one chunk to a batch."""
    leaves, treedef = jax.tree.flatten(batch)
    pairs = list(zip(leaves, dims, strict=True))

    def merged(chunk: Sequence[Any]) -> Any:
        rows = iter(chunk)
        return jax.tree.unflatten(treedef, [leaf if dim is None else next(rows) for leaf, dim in pairs])

    return [stack_chunks(leaf, dim, count) for leaf, dim in pairs if dim is not None], merged


def check_divides(size: int, count: int) -> None:
    """Checks that the number of microbatches divides the batch size.

    Raises:
      SpanaxError: `count` does not divide `size`.
    """
    if size % count:
        raise VariantError(
            f"{count} microbatches do not divide the batch of {size}.",
            fix=f"microbatches={max(divisor for divisor in range(1, count) if size % divisor == 0)}",
        )


def mean_of_microbatches(
    gradient: Callable[..., Any], params: Any, rest: Any, batch: Any, dims: ExampleDims, count: int
) -> tuple[Any, Any, Any, Any]:
    """Returns mean loss, mean metrics, the other state after the last microbatch, and mean gradients.

    Args:
      gradient: maps parameters, other state and batch to `((loss, (metrics, other state, moved)), gradients)`.
      params, rest, batch: its operands.
      dims: the dim with the examples of each array of the batch.
      count: the number of microbatches.

    Raises:
      SpanaxError: the loss writes to a trained parameter.
    """
    examples, merged = partition_examples(batch, dims, count)

    def body(carry: Any, rows: list[Any]) -> tuple[Any, Any]:
        rest, total = carry
        (loss, (metrics, rest, moved)), grads = gradient(params, rest, merged(rows))
        check_unmoved(params, moved, count)
        return (rest, jax.tree.map(jnp.add, total, grads)), (loss, metrics)

    (rest, grads), (losses, metrics) = jax.lax.scan(body, (rest, jax.tree.map(jnp.zeros_like, params)), examples)
    mean = lambda tree: jax.tree.map(lambda leaf: leaf.mean(0), tree)  # noqa: E731
    return losses.mean(), mean(metrics), rest, jax.tree.map(lambda leaf: leaf / count, grads)


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
    parts: Decomposition,
    args: tuple[Any, Any, Any],
    dims: ExampleDims,
    inputs: Values,
    function: Callable[..., Any],
    first: Any,
    weights: Values,
) -> tuple[Any, Any]:
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
