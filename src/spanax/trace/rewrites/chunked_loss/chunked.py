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
from jax.extend import source_info_util

from spanax.errors import SpanaxError
from spanax.trace.jaxpr.graph import bind, opened
from spanax.trace.jaxpr.lines import Line, Lines
from spanax.trace.rewrites.chunked_loss.per_token import Mismatch, Region, across, dependents, narrowed, regions

LINEAR = frozenset(
    "add add_any sub neg transpose reshape squeeze expand_dims broadcast_in_dim reduce_sum convert_element_type copy "
    "slice rev concatenate".split()
)
LINEAR_IN = {"mul": (0, 1), "div": (0,), "select_n": (1, 2), "dot_general": (0, 1), "pad": (0, 1), "cumsum": (0,)}
"""Operations that are linear in some operands, by operand index; products are linear in each one separately."""

PRODUCTS = frozenset({"mul", "dot_general"})
IGNORED = frozenset({"sharding_constraint", "reshard"})
"""User constraints refer to another mesh and to unchunked shapes; the plan chooses shardings instead."""

CHUNKS = "spanax_loss_chunks"
"""Name of the scans over chunks in the name stack, and of their gradients in remat policies."""

Values = dict[int, Any]


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

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves, num_batch = jax.tree.leaves(args), len(jax.tree.leaves(args[-1]))
        lines, candidates = _found(closed, leaves, num_batch)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), _evaluate(lines, _checked(lines, candidates, count), leaves, count)
        )

    return run


def _found(closed: Any, args: Sequence[Any], num_batch: int) -> tuple[Lines, list[Region] | Mismatch | None]:
    lines = Lines.of(*opened(closed))
    candidates = regions(lines, frozenset(lines.inputs[len(args) - num_batch :]))
    is_sum = isinstance(candidates, Mismatch) and candidates.line.name == "reduce_sum"
    if not isinstance(candidates, Mismatch) or not is_sum or len(candidates.line.eqn.params["axes"]) < 2:
        return lines, candidates
    return _found(jax.make_jaxpr(partial(_summed_apart, lines, candidates.line))(*args), args, num_batch)


def _summed_apart(lines: Lines, summed: Line, *args: Any) -> list[Any]:
    """Evaluates lines with a sum over several dims decomposed: first over the last dim, then over the rest."""
    values = dict(lines.known) | dict(zip(lines.inputs, args, strict=True))
    index, (first, (*rest, last)) = lines.lines.index(summed), (summed.ins[0], sorted(summed.eqn.params["axes"]))
    run_lines(lines.lines[:index], values)
    with as_traced(summed):
        (part,) = bind(summed.eqn, [values[first]], dict(summed.eqn.params, axes=(last,)))
        (values[summed.outs[0]],) = bind(summed.eqn, [part], dict(summed.eqn.params, axes=tuple(rest)))
    run_lines(lines.lines[index + 1 :], values)
    return [values[value] for value in lines.outputs]


def _checked(lines: Lines, candidates: list[Region] | Mismatch | None, count: int) -> list[Region]:
    if candidates is None:
        raise SpanaxError(
            "the loss has no logits to take in chunks.",
            where="a product of activations and a weight, and what is done of it token by token",
            fix="loss_chunks=1",
        )
    if isinstance(candidates, Mismatch):
        raise SpanaxError(
            f"the logits cannot be taken in chunks: {candidates.why}.",
            where=candidates.line.where,
            fix="a loss that reads them token by token, or loss_chunks=1",
        )
    for region in candidates:
        num_tokens = region.most_chunks(lines)
        if num_tokens % count:
            near = max(number for number in range(1, count) if num_tokens % number == 0)
            raise SpanaxError(
                f"{count} chunks do not divide the {num_tokens} tokens of a row.", fix=f"loss_chunks={near}"
            )
    return candidates


def _evaluate(lines: Lines, logit_regions: Sequence[Region], args: Sequence[Any], count: int) -> list[Any]:
    values = dict(lines.known) | dict(zip(lines.inputs, args, strict=True))
    member_indices = {index for region in logit_regions for index in region.lines}
    outs = [value for region in logit_regions for value in region.outs]
    after = dependents(lines, outs)
    is_late = [not after.isdisjoint(line.ins) for line in lines.lines]
    early = [line for index, line in enumerate(lines.lines) if index not in member_indices and not is_late[index]]
    late = [line for index, line in enumerate(lines.lines) if index not in member_indices and is_late[index]]
    run_lines(early, values)
    (loss, *_) = lines.outputs
    if loss not in after or lines.shape(loss) or not is_linear(lines, late, after, loss):
        for region in logit_regions:
            values |= _recomputed(lines, region, values, count)
        run_lines(late, values)
        return [values[value] for value in lines.outputs]
    floats = [value for value in outs if jnp.issubdtype(lines.avals[value].dtype, jnp.floating)]
    weights = _weights(lines, late, values, floats, loss)
    slope = jnp.zeros((), lines.avals[loss].dtype)
    for region in logit_regions:
        results, term = _with_slope(lines, region, values, weights, slope, count)
        values, slope = values | results, slope + term
    run_lines(late, values)
    values[loss] = _sloped(values[loss], slope)
    return [values[value] for value in lines.outputs]


def run_lines(some: Sequence[Line], values: Values) -> None:
    for line in some:
        with as_traced(line):
            outs = bind(line.eqn, [values[value] for value in line.ins], dict(line.eqn.params))
        values.update(zip(line.outs, outs, strict=True))


def as_traced(line: Line) -> Any:
    source_info = line.eqn.source_info
    return source_info_util.user_context(
        source_info.traceback, name_stack=source_info_util.current_name_stack() + source_info.name_stack
    )


def is_linear(lines: Lines, behind: Sequence[Line], after: set[int], loss: int) -> bool:
    """Whether the loss is linear in its per-token terms, so that their weights do not depend on them."""
    live = {loss}
    for line in behind[::-1]:
        if live.isdisjoint(line.outs):
            continue
        dependent = [index for index, value in enumerate(line.ins) if value in after]
        linear_in = range(len(line.ins)) if line.name in LINEAR else LINEAR_IN.get(line.name, ())
        if not set(dependent) <= set(linear_in) or (line.name in PRODUCTS and len(dependent) > 1):
            return False
        live.update(line.ins)
    return True


def _weights(lines: Lines, late: Sequence[Line], values: Values, floats: Sequence[int], loss: int) -> Values:
    """Returns the weight of each per-token value in the loss, under `stop_gradient`."""

    def of_tokens(token_values: list[Any]) -> Any:
        substituted = dict(values) | dict(zip(floats, token_values, strict=True))
        needed = _leading_to(late, {loss})
        run_lines(needed, substituted)
        return substituted[loss]

    zeros = [jnp.zeros(lines.shape(value), lines.avals[value].dtype) for value in floats]
    gradients = jax.lax.stop_gradient(jax.grad(of_tokens)(zeros))
    return dict(zip(floats, gradients, strict=True))


def _leading_to(candidates: Sequence[Line], live: set[int]) -> list[Line]:
    needed = []
    for line in candidates[::-1]:
        if not live.isdisjoint(line.outs):
            needed.append(line)
            live |= {*line.ins}
    return needed[::-1]


@jax.custom_vjp
def _sloped(value: Any, slope: Any) -> Any:
    """Returns `value`; in the backward pass, its cotangent also flows to `slope`."""
    return value


_sloped.defvjp(lambda value, slope: (value, None), lambda _, of_value: (of_value, of_value))


def _some(lines: Lines, region: Region, count: int, fixed: Values, scanned: Values) -> list[Any]:
    """Returns the outputs of a region for one chunk."""
    values = dict(lines.known) | fixed | scanned
    for index in region.lines:
        line = lines.lines[index]
        dim = region.dims[line.outs[0]]
        operand_dims = across(lines, line, dim)
        assert operand_dims is not None
        ins = [values[value] for value in line.ins]
        with as_traced(line):
            is_plain = line.name not in IGNORED
            outs = bind(line.eqn, ins, narrowed(line, dim, operand_dims, count)) if is_plain else ins[:1]
        values.update(zip(line.outs, outs, strict=True))
    return [values[value] for value in region.outs]


def _recomputed(lines: Lines, region: Region, values: Values, count: int) -> Values:
    """Returns the outputs of a region, scanned over chunks and recomputed in the backward pass."""
    fixed, scanned = _taken(region, values, count)

    def body(_: None, part: Values) -> tuple[None, list[Any]]:
        return None, jax.checkpoint(partial(_some, lines, region, count), prevent_cse=False)(fixed, part)

    return _joined(region, _loop(body, None, scanned)[1])


def _with_slope(
    lines: Lines, region: Region, values: Values, weights: Values, slope: Any, count: int
) -> tuple[Values, Any]:
    """Returns the outputs of a region, scanned over chunks, and a zero with the gradient of their weighted sum."""
    taken = _taken(region, values, count)
    weighed = {value: apart(weights[value], region.dims[value], count) for value in region.outs if value in weights}
    smooth, nondiff = zip(*map(_by_kind, taken), strict=True)
    evaluate_chunk = partial(_some, lines, region, count)

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
        outs, residuals = jax.tree.map(lambda x: checkpoint_name(x, CHUNKS), (outs, (like, of_scanned)))
        return (outs, jnp.zeros_like(slope)), residuals

    def backward(residuals: Any, of_outs: tuple[Any, Any]) -> tuple[Any, None, None]:
        return jax.tree.map(lambda grad: grad * of_outs[1].astype(grad.dtype), residuals), None, None

    call = jax.custom_vjp(primal)
    call.defvjp(forward, backward)
    outs, zero = call(smooth, nondiff, weighed)
    return _joined(region, jax.lax.stop_gradient(outs)), zero


def _loop(body: Callable[..., Any], first: Any, parts: Any) -> Any:
    with jax.named_scope(CHUNKS):
        return jax.lax.scan(body, first, parts)


def _taken(region: Region, values: Values, count: int) -> tuple[Values, Values]:
    # A copy is free and can be all-gathered once: the weight itself would be gathered in every iteration.
    fixed = {value: jnp.copy(values[value]) for value in region.fixed}
    return fixed, {value: apart(values[value], region.dims[value], count) for value in region.scanned}


def _by_kind(values: Values) -> tuple[Values, Values]:
    """Partitions values into floating-point ones, which have gradients, and the rest."""
    floating = {value: array for value, array in values.items() if jnp.issubdtype(jnp.result_type(array), jnp.floating)}
    return floating, {value: array for value, array in values.items() if value not in floating}


def _joined(region: Region, outs: Sequence[Any]) -> Values:
    pairs = zip(region.outs, outs, strict=True)
    return {value: together(array, region.dims[value]) for value, array in pairs}


def apart(array: Any, dim: int, count: int) -> Any:
    """Stacks chunks along a new first dim; chunks are strided by `count`, so that rows stay on their device."""
    shape = jnp.shape(array)
    parts = jnp.reshape(array, (*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :]))
    return jnp.moveaxis(parts, dim + 1, 0)


def together(parts: Any, dim: int) -> Any:
    count, *shape = parts.shape
    return jnp.moveaxis(parts, 0, dim + 1).reshape((*shape[:dim], count * shape[dim], *shape[dim + 1 :]))
