"""Rewrites a loss so that each attention is one operation.

The rewrite precedes differentiation, so that autodiff uses the gradient of the operation. It descends into layers
(scan, remat, cond). Functions with a custom derivative are left unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.extend import core, source_info_util

from spanax.errors import SpanaxError
from spanax.trace.jaxpr.graph import bind, opened, remat_of, retraced
from spanax.trace.jaxpr.lines import Line, Lines
from spanax.trace.rewrites.attention.kernels import Unfit, kernel_of
from spanax.trace.rewrites.attention.match import AttentionMatch, Mismatch, as_written, attentions, canonical
from spanax.trace.rewrites.attention.operation import attention
from spanax.trace.rewrites.remat_policies import RING


@dataclass(frozen=True)
class FusedAttention:
    """The implementation of one attention: a platform kernel, or None for plain; `detail` has sizes or the reason."""

    kernel: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.kernel or 'plain'}{self.detail}"


def fuse_attention(
    function: Callable[..., Any], context: str = RING, outcomes: list[FusedAttention] | None = None
) -> Callable[..., Any]:
    """Returns an equivalent pure function in which each attention is one operation.

    With `ring`, every attention must match. With a kernel, attentions that it does not support are left unchanged.

    Args:
      function: the loss.
      context: `ring`, or the name of the kernel.
      outcomes: receives the implementation of each attention if a kernel is requested.

    Raises:
      SpanaxError: when called with `ring`, if the loss has no attention, or one that does not match.

    Example:
      >>> def loss(q, k, v):
      ...     return jax.nn.dot_product_attention(q, k, v, is_causal=True).sum()
      >>> q = k = v = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")
      >>> str(jax.make_jaxpr(fuse_attention(loss))(q, k, v)).count("= spanax_attention[")
      1
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        jaxpr, consts = opened(closed)
        matches: list[AttentionMatch | Mismatch] = []
        outs = _evaluate(jaxpr, consts, jax.tree.leaves(args), matches, context)
        if context == RING:
            _check(matches)
        elif outcomes is not None:
            outcomes.extend(_outcomes(matches, context))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


def _check(matches: Sequence[AttentionMatch | Mismatch]) -> None:
    mismatches = [match for match in matches if isinstance(match, Mismatch)]
    if mismatches:
        raise SpanaxError(
            f"an attention cannot go around a ring: it has {mismatches[0].why}.",
            where=mismatches[0].line.where,
            fix="no dropout on attention weights, or the gathered form: layout 'context'",
        )
    if not matches:
        raise SpanaxError(
            "nothing can go around a ring: the loss has no softmax attention.",
            where="two products with a softmax over one dim between them, in the loss or its layers",
            fix="the gathered form: layout 'context'",
        )


def _outcomes(matches: Sequence[AttentionMatch | Mismatch], kernel: str) -> list[FusedAttention]:
    """Returns the implementation of each attention."""
    location = lambda match: match.line.where  # noqa: E731
    return [
        FusedAttention(None, f" at {location(match)}: {match.why}")
        if isinstance(match, Mismatch)
        else FusedAttention(kernel, f" for {_name(match)}")
        for match in matches
    ] or [FusedAttention(None, ": the loss has no softmax attention")]


def _name(match: AttentionMatch) -> str:
    queries, keys = (match.form.sizes[label] for label in (match.form.queries, match.form.keys))
    is_causal = match.kernel is not None and match.kernel.is_causal
    return f"{queries:,} x {keys:,}" + " causal" * is_causal


def _fitted(lines: Lines, index: int, match: AttentionMatch | Mismatch, kernel: str) -> AttentionMatch | Mismatch:
    """Returns an attention with its kernel, or why the kernel does not support it."""
    if isinstance(match, Mismatch):
        return match
    shapes = [jax.eval_shape(partial(canonical, order=order), lines.avals[value]) for value, order in match.operands]
    kernel_or_unfit = kernel_of(kernel, match.form, *shapes)
    return (
        Mismatch(kernel_or_unfit.why, lines.lines[index])
        if isinstance(kernel_or_unfit, Unfit)
        else replace(match, kernel=kernel_or_unfit)
    )


def _evaluate(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    matches: list[AttentionMatch | Mismatch],
    context: str,
) -> list[Any]:
    lines = Lines.of(jaxpr, consts)
    fused = attentions(lines)
    if context != RING:
        fused = {index: _fitted(lines, index, match, context) for index, match in fused.items()}
    matches += fused.values()
    values = dict(lines.known) | dict(zip(lines.inputs, args, strict=True))
    for index in _needed(lines, fused):
        line, match = lines.lines[index], fused.get(index)
        with source_info_util.user_context(
            line.eqn.source_info.traceback,
            name_stack=source_info_util.current_name_stack() + line.eqn.source_info.name_stack,
        ):
            if isinstance(match, AttentionMatch):
                outs = [_attend(lines, line, match, values)]
            else:
                outs = _apply(line, [values[value] for value in line.ins], matches, context)
        values.update(zip(line.outs, outs, strict=True))
    return [values[value] for value in lines.outputs]


def _needed(lines: Lines, fused: dict[int, AttentionMatch | Mismatch]) -> list[int]:
    """Returns the lines to evaluate, without those that only produce the scores of a fused attention."""
    live, needed = set(lines.outputs), []
    for index in range(len(lines.lines) - 1, -1, -1):
        line, match = lines.lines[index], fused.get(index)
        if line.eqn.effects or live.intersection(line.outs):
            needed.append(index)
            live.update(match.needs if isinstance(match, AttentionMatch) else line.ins)
    return needed[::-1]


def _attend(lines: Lines, line: Line, match: AttentionMatch, values: dict[int, Any]) -> Any:
    q, k, v = (canonical(values[value], order) for value, order in match.operands)
    (result,) = line.outs
    dtype = lines.avals[result].dtype
    out = attention(match.form, dtype, q, k, v, [values[value] for value in match.extras], match.kernel)
    return as_written(out, match.out, lines.shape(result))


def _apply(line: Line, ins: Sequence[Any], matches: list[AttentionMatch | Mismatch], context: str) -> list[Any]:
    eqn, name, params = line.eqn, line.name, dict(line.eqn.params)

    def inner(body: Any) -> Callable[..., list[Any]]:
        jaxpr, consts = opened(body)
        return lambda *args: _evaluate(jaxpr, consts, args, matches, context)

    if (remat := remat_of(eqn)) is not None:
        if not _holds(remat["jaxpr"]):
            return bind(eqn, ins, params)
        function = jax.checkpoint(inner(remat["jaxpr"]), policy=remat["policy"], prevent_cse=remat["prevent_cse"])
        outs: list[Any] = function(*ins)
        return outs
    if name == "scan" and _holds(params["jaxpr"]):
        return bind(eqn, ins, params | {"jaxpr": retraced(params["jaxpr"], inner(params["jaxpr"]))})
    if name == "cond" and any(map(_holds, params["branches"])):
        return bind(
            eqn, ins, params | {"branches": tuple(retraced(branch, inner(branch)) for branch in params["branches"])}
        )
    return bind(eqn, ins, params)


def _holds(body: Any) -> bool:
    """Whether a body contains a matmul at any depth; without one it contains no attention."""
    jaxpr, _ = opened(body)
    return any(eqn.primitive.name == "dot_general" or any(map(_holds, _bodies(eqn))) for eqn in jaxpr.eqns)


def _bodies(eqn: core.JaxprEqn) -> list[Any]:
    params = remat_of(eqn) or eqn.params
    bodies = [body for value in params.values() for body in (value if isinstance(value, tuple | list) else (value,))]
    return [body for body in bodies if hasattr(opened(body)[0], "eqns")]
