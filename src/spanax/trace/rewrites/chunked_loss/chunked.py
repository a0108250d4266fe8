"""Rewrites a loss so that its logits are computed in chunks of tokens, together with their gradients.

The rewrite precedes differentiation. Where the loss is linear in its per-token terms, the weight of each token is known
in advance; a chunk computes its gradients in the forward pass and nothing is computed twice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spanax.errors import VariantError
from spanax.trace.jaxpr.graph import CALLS, Graph, Op, from_jaxpr
from spanax.trace.jaxpr.interpret import Values, evaluate, read, run
from spanax.trace.jaxpr.linear import PRODUCTS, linear_operands
from spanax.trace.jaxpr.marks import LOSS_CHUNKS
from spanax.trace.rewrites.chunked_loss.per_token import Mismatch, Region, across, dependents, narrowed, regions

IGNORED = frozenset({"sharding_constraint", "reshard"})
"""User constraints refer to another mesh and to unchunked shapes; the plan chooses shardings instead."""


def chunked_loss(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Returns an equivalent pure function that computes its logits in `count` chunks, one at a time.

    Args:
      function: takes pytrees of arrays, the batch last; the first array that it returns is the loss.
      count: number of chunks; 1 returns `function` unchanged.

    Raises:
      SpanaxError: when called, if the loss has no logits, or its logits cannot be chunked.

    Example:
      >>> def loss(head, batch):
      ...     logits = batch["x"] @ head
      ...     return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()
      >>> head, x, y = jnp.ones((4, 100)), jnp.ones((8, 4)), jnp.zeros(8, "int32")
      >>> text = str(jax.make_jaxpr(jax.grad(chunked_loss(loss, 4)))(head, {"x": x, "y": y}))
      >>> "f32[8,100]" in text, "f32[2,100]" in text
      (False, True)
    """
    if count == 1:
        return function

    def chunked(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        num_batch = len(jax.tree.leaves(args[-1]))
        graph, candidates = _candidates(closed, leaves, num_batch)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), _evaluate(graph, _checked(graph, candidates, count), leaves, count)
        )

    return chunked


def _candidates(closed: Any, args: Sequence[Any], num_batch: int) -> tuple[Graph, list[Region] | Mismatch | None]:
    graph = from_jaxpr(closed, CALLS, as_traced=True)
    candidates = regions(graph, frozenset(graph.body.inputs[len(args) - num_batch :]))
    is_sum = isinstance(candidates, Mismatch) and candidates.op.name == "reduce_sum"
    if not isinstance(candidates, Mismatch) or not is_sum or len(candidates.op.params["axes"]) < 2:
        return graph, candidates
    summed = candidates.op
    *rest, last = sorted(candidates.op.params["axes"])

    def override(op: Op, ins: Sequence[Any]) -> list[Any] | None:
        """Decomposes the sum over several dims: first over the last dim, then over the rest."""
        parts = op.bind(ins, op.params | {"axes": (last,)}) if op is summed else None
        return parts and op.bind(parts, op.params | {"axes": tuple(rest)})

    again = jax.make_jaxpr(lambda *args: evaluate(graph, args, override))(*args)
    return _candidates(again, args, num_batch)


def _checked(graph: Graph, candidates: list[Region] | Mismatch | None, count: int) -> list[Region]:
    if candidates is None:
        raise VariantError(
            "the loss has no logits to compute in chunks.",
            where="a product of activations and a weight, and the operations that follow it token by token",
            fix="loss_chunks=1",
        )
    if isinstance(candidates, Mismatch):
        raise VariantError(
            f"the logits cannot be computed in chunks: {candidates.why}.",
            where=candidates.op.where,
            fix="a loss that reads them token by token, or loss_chunks=1",
        )
    for region in candidates:
        num_tokens = region.most_chunks(graph)
        if num_tokens % count:
            near = max(number for number in range(1, count) if num_tokens % number == 0)
            raise VariantError(
                f"{count} chunks do not divide the {num_tokens} tokens of a row.", fix=f"loss_chunks={near}"
            )
    return candidates


def _evaluate(graph: Graph, logit_regions: Sequence[Region], args: Sequence[Any], count: int) -> list[Any]:
    values = dict(zip(graph.body.inputs, args, strict=True))
    members = {op for region in logit_regions for op in region.ops}
    outs = [value for region in logit_regions for value in region.outs]
    after = dependents(graph, outs)
    others = [op for op in graph.body.ops if op not in members]
    late = [op for op in others if not after.isdisjoint(op.inputs)]
    run(graph, [op for op in others if after.isdisjoint(op.inputs)], values)
    loss, *_ = graph.body.outputs
    if loss not in after or graph.shape(loss) or not is_linear(late, after, loss):
        for region in logit_regions:
            values |= _recomputed(graph, region, values, count)
        run(graph, late, values)
        return read(graph, values, graph.body.outputs)
    floats = [value for value in outs if jnp.issubdtype(graph.avals[value].dtype, jnp.floating)]
    weights = _weights(graph, values, floats, loss)
    slope = jnp.zeros((), graph.avals[loss].dtype)
    for region in logit_regions:
        results, term = _with_slope(graph, region, values, weights, slope, count)
        values, slope = values | results, slope + term
    run(graph, late, values)
    values[loss] = _sloped(values[loss], slope)
    return read(graph, values, graph.body.outputs)


def is_linear(ops: Sequence[Op], after: set[int], loss: int) -> bool:
    """Whether the loss is linear in its per-token terms, so that their weights do not depend on them."""
    live = {loss}
    for op in ops[::-1]:
        if live.isdisjoint(op.outputs):
            continue
        dependent = [index for index, value in enumerate(op.inputs) if value in after]
        if not set(dependent) <= set(linear_operands(op)) or (op.name in PRODUCTS and len(dependent) > 1):
            return False
        live.update(op.inputs)
    return True


def _weights(graph: Graph, values: Values, floats: Sequence[int], loss: int) -> Values:
    """Returns the weight of each per-token value in the loss, under `stop_gradient`."""

    needed = graph.slice([loss], values.keys() | {*floats})

    def of_tokens(token_values: list[Any]) -> Any:
        substituted = dict(values) | dict(zip(floats, token_values, strict=True))
        run(graph, needed, substituted)
        return substituted[loss]

    zeros = [jnp.zeros(graph.shape(value), graph.avals[value].dtype) for value in floats]
    gradients = jax.lax.stop_gradient(jax.grad(of_tokens)(zeros))
    return dict(zip(floats, gradients, strict=True))


@jax.custom_vjp
def _sloped(value: Any, slope: Any) -> Any:
    """Returns `value`; in the backward pass, its cotangent also flows to `slope`."""
    return value


_sloped.defvjp(lambda value, slope: (value, None), lambda _, of_value: (of_value, of_value))


def _evaluate_chunk(graph: Graph, region: Region, count: int, fixed: Values, scanned: Values) -> list[Any]:
    """Returns the outputs of a region for one chunk."""

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any]:
        dim = region.dims[op.outputs[0]]
        operand_dims = across(graph, op, dim)
        assert operand_dims is not None
        return ins[:1] if op.name in IGNORED else op.bind(ins, narrowed(op, dim, operand_dims, count))

    values = fixed | scanned
    run(graph, region.ops, values, override)
    return read(graph, values, region.outs)


def _recomputed(graph: Graph, region: Region, values: Values, count: int) -> Values:
    """Returns the outputs of a region, scanned over chunks and recomputed in the backward pass."""
    fixed, scanned = _inputs_in_chunks(graph, region, values, count)

    def body(_: None, part: Values) -> tuple[None, list[Any]]:
        return None, jax.checkpoint(partial(_evaluate_chunk, graph, region, count), prevent_cse=False)(fixed, part)

    return _merged(region, _loop(body, None, scanned)[1])


def _with_slope(
    graph: Graph, region: Region, values: Values, weights: Values, slope: Any, count: int
) -> tuple[Values, Any]:
    """Returns the outputs of a region, scanned over chunks, and a zero with the gradient of their weighted sum."""
    inputs = _inputs_in_chunks(graph, region, values, count)
    weighed = {
        value: stack_chunks(weights[value], region.dims[value], count) for value in region.outs if value in weights
    }
    smooth, nondiff = zip(*map(_by_smoothness, inputs), strict=True)
    evaluate_chunk = partial(_evaluate_chunk, graph, region, count)

    def primal(smooth: Any, nondiff: Any, weighed: Values) -> tuple[list[Any], Any]:
        fixed = smooth[0] | nondiff[0]
        body = lambda _, part: (None, evaluate_chunk(fixed, part))  # noqa: E731
        return _loop(body, None, smooth[1] | nondiff[1])[1], jnp.zeros_like(slope)

    def forward(smooth: Any, nondiff: Any, weighed: Values) -> tuple[Any, Any]:
        def body(total: Values, part: tuple[Values, Values, Values]) -> tuple[Values, Any]:
            def differentiable(fixed: Values, scanned: Values) -> tuple[list[Any], list[Any]]:
                outs = evaluate_chunk(fixed | nondiff[0], scanned | part[1])
                pairs = list(zip(region.outs, outs, strict=True))
                return [out for value, out in pairs if value in weighed], outs

            _, pullback, outs = jax.vjp(differentiable, smooth[0], part[0], has_aux=True)
            of_fixed, of_scanned = pullback([part[2][value] for value in region.outs if value in weighed])
            return jax.tree.map(lambda sum_, term: sum_ + term.astype(sum_.dtype), total, of_fixed), (outs, of_scanned)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), smooth[0])
        total, (outs, of_scanned) = _loop(body, zeros, (smooth[1], nondiff[1], weighed))
        like = jax.tree.map(lambda sum_, of: sum_.astype(of.dtype), total, smooth[0])
        outs, residuals = jax.tree.map(lambda x: checkpoint_name(x, LOSS_CHUNKS), (outs, (like, of_scanned)))
        return (outs, jnp.zeros_like(slope)), residuals

    def backward(residuals: Any, of_outs: tuple[Any, Any]) -> tuple[Any, None, None]:
        return jax.tree.map(lambda grad: grad * of_outs[1].astype(grad.dtype), residuals), None, None

    call = jax.custom_vjp(primal)
    call.defvjp(forward, backward)
    outs, zero = call(smooth, nondiff, weighed)
    return _merged(region, jax.lax.stop_gradient(outs)), zero


def _loop(body: Callable[..., Any], first: Any, parts: Any) -> Any:
    with jax.named_scope(LOSS_CHUNKS):
        return jax.lax.scan(body, first, parts)


def _inputs_in_chunks(graph: Graph, region: Region, values: Values, count: int) -> tuple[Values, Values]:
    # A copy is free and can be all-gathered once: the weight itself would be gathered in every iteration.
    fixed = {value: jnp.copy(values[value]) for value in region.fixed}
    scanned = zip(region.scanned, read(graph, values, region.scanned), strict=True)
    return fixed, {value: stack_chunks(array, region.dims[value], count) for value, array in scanned}


def _by_smoothness(values: Values) -> tuple[Values, Values]:
    """Partitions values into floating-point ones, which have gradients, and the rest."""
    floating = {value: array for value, array in values.items() if jnp.issubdtype(jnp.result_type(array), jnp.floating)}
    return floating, {value: array for value, array in values.items() if value not in floating}


def _merged(region: Region, outs: Sequence[Any]) -> Values:
    pairs = zip(region.outs, outs, strict=True)
    return {value: merge_chunks(array, region.dims[value]) for value, array in pairs}


def stack_chunks(array: Any, dim: int, count: int) -> Any:
    """Stacks chunks along a new first dim; chunks are strided by `count`, so that rows stay on their device."""
    shape = jnp.shape(array)
    parts = jnp.reshape(array, (*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :]))
    return jnp.moveaxis(parts, dim + 1, 0)


def merge_chunks(parts: Any, dim: int) -> Any:
    """Inverts `stack_chunks`."""
    count, *shape = parts.shape
    return jnp.moveaxis(parts, 0, dim + 1).reshape((*shape[:dim], count * shape[dim], *shape[dim + 1 :]))
