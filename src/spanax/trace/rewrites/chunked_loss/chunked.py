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
"""Operations that are linear in some of their operands; products in one of both."""

PRODUCTS = frozenset({"mul", "dot_general"})
IGNORED = frozenset({"sharding_constraint", "reshard"})
"""A user's own constraints name a mesh and shapes that are not these; the plan places what is here."""

CHUNKS = "spanax_loss_chunks"
"""What the loops over chunks are called in the name stack, and their gradients for a remat: to be known again."""

Values = dict[int, Any]


def chunked_loss(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A pure function of arrays that computes the same, its logits in so many chunks one after the other.

    Args:
      function: takes pytrees of arrays, the batch last; the first array that it returns is the loss.
      count: how many chunks; with 1 it is the function itself.

    Raises:
      SpanaxError: when called, if there are no logits in it, or some that cannot be taken so.

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
        lines, found = _found(closed, leaves, num_batch)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), _evaluate(lines, _checked(lines, found, count), leaves, count)
        )

    return run


def _found(closed: Any, args: Sequence[Any], num_batch: int) -> tuple[Lines, list[Region] | Mismatch | None]:
    lines = Lines.of(*opened(closed))
    found = regions(lines, frozenset(lines.inputs[len(args) - num_batch :]))
    is_sum = isinstance(found, Mismatch) and found.line.name == "reduce_sum"
    if not isinstance(found, Mismatch) or not is_sum or len(found.line.eqn.params["axes"]) < 2:
        return lines, found
    return _found(jax.make_jaxpr(partial(_summed_apart, lines, found.line))(*args), args, num_batch)


def _summed_apart(lines: Lines, summed: Line, *args: Any) -> list[Any]:
    """The same, with one sum over several dims as a sum over the last of them and one over the others."""
    values = dict(lines.known) | dict(zip(lines.inputs, args, strict=True))
    at, (first, (*rest, last)) = lines.lines.index(summed), (summed.ins[0], sorted(summed.eqn.params["axes"]))
    run_lines(lines.lines[:at], values)
    with as_traced(summed):
        (part,) = bind(summed.eqn, [values[first]], dict(summed.eqn.params, axes=(last,)))
        (values[summed.outs[0]],) = bind(summed.eqn, [part], dict(summed.eqn.params, axes=tuple(rest)))
    run_lines(lines.lines[at + 1 :], values)
    return [values[value] for value in lines.outputs]


def _checked(lines: Lines, found: list[Region] | Mismatch | None, count: int) -> list[Region]:
    if found is None:
        raise SpanaxError(
            "the loss has no logits to take in chunks.",
            where="a product of activations and a weight, and what is done of it token by token",
            fix="loss_chunks=1",
        )
    if isinstance(found, Mismatch):
        raise SpanaxError(
            f"the logits cannot be taken in chunks: {found.why}.",
            where=found.line.where,
            fix="a loss that reads them token by token, or loss_chunks=1",
        )
    for one in found:
        most = one.most_chunks(lines)
        if most % count:
            near = max(number for number in range(1, count) if most % number == 0)
            raise SpanaxError(f"{count} chunks do not divide the {most} tokens of a row.", fix=f"loss_chunks={near}")
    return found


def _evaluate(lines: Lines, found: Sequence[Region], args: Sequence[Any], count: int) -> list[Any]:
    values = dict(lines.known) | dict(zip(lines.inputs, args, strict=True))
    members = {at for one in found for at in one.lines}
    outs = [value for one in found for value in one.outs]
    after = dependents(lines, outs)
    is_late = [not after.isdisjoint(line.ins) for line in lines.lines]
    ahead = [line for at, line in enumerate(lines.lines) if at not in members and not is_late[at]]
    behind = [line for at, line in enumerate(lines.lines) if at not in members and is_late[at]]
    run_lines(ahead, values)
    (loss, *_) = lines.outputs
    if loss not in after or lines.shape(loss) or not is_linear(lines, behind, after, loss):
        for one in found:
            values |= _recomputed(lines, one, values, count)
        run_lines(behind, values)
        return [values[value] for value in lines.outputs]
    floats = [value for value in outs if jnp.issubdtype(lines.avals[value].dtype, jnp.floating)]
    weights = _weights(lines, behind, values, floats, loss)
    slope = jnp.zeros((), lines.avals[loss].dtype)
    for one in found:
        made, more = _with_slope(lines, one, values, weights, slope, count)
        values, slope = values | made, slope + more
    run_lines(behind, values)
    values[loss] = _sloped(values[loss], slope)
    return [values[value] for value in lines.outputs]


def run_lines(some: Sequence[Line], values: Values) -> None:
    for line in some:
        with as_traced(line):
            outs = bind(line.eqn, [values[value] for value in line.ins], dict(line.eqn.params))
        values.update(zip(line.outs, outs, strict=True))


def as_traced(line: Line) -> Any:
    told = line.eqn.source_info
    return source_info_util.user_context(
        told.traceback, name_stack=source_info_util.current_name_stack() + told.name_stack
    )


def is_linear(lines: Lines, behind: Sequence[Line], after: set[int], loss: int) -> bool:
    """Whether the loss is linear in what the tokens give: then it weighs each of them by what is known before."""
    wanted = {loss}
    for line in behind[::-1]:
        if wanted.isdisjoint(line.outs):
            continue
        hang = [at for at, value in enumerate(line.ins) if value in after]
        linear_in = range(len(line.ins)) if line.name in LINEAR else LINEAR_IN.get(line.name, ())
        if not set(hang) <= set(linear_in) or (line.name in PRODUCTS and len(hang) > 1):
            return False
        wanted.update(line.ins)
    return True


def _weights(lines: Lines, behind: Sequence[Line], values: Values, floats: Sequence[int], loss: int) -> Values:
    """What the loss weighs each token's values by; nothing is differentiated through them."""

    def of_tokens(given: list[Any]) -> Any:
        inner = dict(values) | dict(zip(floats, given, strict=True))
        needed = _leading_to(behind, {loss})
        run_lines(needed, inner)
        return inner[loss]

    zeros = [jnp.zeros(lines.shape(value), lines.avals[value].dtype) for value in floats]
    found = jax.lax.stop_gradient(jax.grad(of_tokens)(zeros))
    return dict(zip(floats, found, strict=True))


def _leading_to(some: Sequence[Line], wanted: set[int]) -> list[Line]:
    needed = []
    for line in some[::-1]:
        if not wanted.isdisjoint(line.outs):
            needed.append(line)
            wanted |= {*line.ins}
    return needed[::-1]


@jax.custom_vjp
def _sloped(value: Any, slope: Any) -> Any:
    """A value whose gradient is that of another one as well."""
    return value


_sloped.defvjp(lambda value, slope: (value, None), lambda _, of_value: (of_value, of_value))


def _some(lines: Lines, one: Region, count: int, fixed: Values, scanned: Values) -> list[Any]:
    """What a region gives of one chunk."""
    values = dict(lines.known) | fixed | scanned
    for at in one.lines:
        line = lines.lines[at]
        dim = one.dims[line.outs[0]]
        wanted = across(lines, line, dim)
        assert wanted is not None
        ins = [values[value] for value in line.ins]
        with as_traced(line):
            is_plain = line.name not in IGNORED
            outs = bind(line.eqn, ins, narrowed(line, dim, wanted, count)) if is_plain else ins[:1]
        values.update(zip(line.outs, outs, strict=True))
    return [values[value] for value in one.outs]


def _recomputed(lines: Lines, one: Region, values: Values, count: int) -> Values:
    """What a region gives, chunk by chunk, and for the gradient once more."""
    fixed, scanned = _taken(one, values, count)

    def turn(_: None, part: Values) -> tuple[None, list[Any]]:
        return None, jax.checkpoint(partial(_some, lines, one, count), prevent_cse=False)(fixed, part)

    return _joined(one, _loop(turn, None, scanned)[1])


def _with_slope(
    lines: Lines, one: Region, values: Values, weights: Values, slope: Any, count: int
) -> tuple[Values, Any]:
    """What a region gives, chunk by chunk, and a zero that has the gradient of their weighted sum."""
    taken = _taken(one, values, count)
    weighed = {value: apart(weights[value], one.dims[value], count) for value in one.outs if value in weights}
    smooth, others = zip(*map(_by_kind, taken), strict=True)
    some = partial(_some, lines, one, count)

    def given(smooth: Any, others: Any, weighed: Values) -> tuple[list[Any], Any]:
        fixed = smooth[0] | others[0]
        turn = lambda _, part: (None, some(fixed, part))  # noqa: E731
        return _loop(turn, None, smooth[1] | others[1])[1], jnp.zeros_like(slope)

    def forward(smooth: Any, others: Any, weighed: Values) -> tuple[Any, Any]:
        def turn(total: Values, part: tuple[Values, Values, Values]) -> tuple[Values, Any]:
            def of_floats(fixed: Values, scanned: Values) -> tuple[list[Any], list[Any]]:
                outs = some(fixed | others[0], scanned | part[1])
                pairs = list(zip(one.outs, outs, strict=True))
                return [out for value, out in pairs if value in weighed], outs

            _, back, outs = jax.vjp(of_floats, smooth[0], part[0], has_aux=True)
            of_fixed, of_scanned = back([part[2][value] for value in one.outs if value in weighed])
            return jax.tree.map(lambda sum_, new: sum_ + new.astype(sum_.dtype), total, of_fixed), (outs, of_scanned)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), smooth[0])
        total, (outs, of_scanned) = _loop(turn, zeros, (smooth[1], others[1], weighed))
        like = jax.tree.map(lambda sum_, of: sum_.astype(of.dtype), total, smooth[0])
        outs, kept = jax.tree.map(lambda x: checkpoint_name(x, CHUNKS), (outs, (like, of_scanned)))
        return (outs, jnp.zeros_like(slope)), kept

    def backward(kept: Any, of_outs: tuple[Any, Any]) -> tuple[Any, None, None]:
        return jax.tree.map(lambda grad: grad * of_outs[1].astype(grad.dtype), kept), None, None

    call = jax.custom_vjp(given)
    call.defvjp(forward, backward)
    outs, more = call(smooth, others, weighed)
    return _joined(one, jax.lax.stop_gradient(outs)), more


def _loop(turn: Callable[..., Any], first: Any, parts: Any) -> Any:
    with jax.named_scope(CHUNKS):
        return jax.lax.scan(turn, first, parts)


def _taken(one: Region, values: Values, count: int) -> tuple[Values, Values]:
    # A copy costs nothing, and is something to be gathered: a weight itself would be in every turn.
    fixed = {value: jnp.copy(values[value]) for value in one.fixed}
    return fixed, {value: apart(values[value], one.dims[value], count) for value in one.scanned}


def _by_kind(values: Values) -> tuple[Values, Values]:
    """Those that have gradients, and the others."""
    smooth = {value: array for value, array in values.items() if jnp.issubdtype(jnp.result_type(array), jnp.floating)}
    return smooth, {value: array for value, array in values.items() if value not in smooth}


def _joined(one: Region, outs: Sequence[Any]) -> Values:
    pairs = zip(one.outs, outs, strict=True)
    return {value: together(array, one.dims[value]) for value, array in pairs}


def apart(array: Any, dim: int, count: int) -> Any:
    """Chunks along a new first dim: every `count`-th row, so that a device's rows stay its own."""
    shape = jnp.shape(array)
    parts = jnp.reshape(array, (*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :]))
    return jnp.moveaxis(parts, dim + 1, 0)


def together(parts: Any, dim: int) -> Any:
    count, *shape = parts.shape
    return jnp.moveaxis(parts, 0, dim + 1).reshape((*shape[:dim], count * shape[dim], *shape[dim + 1 :]))
