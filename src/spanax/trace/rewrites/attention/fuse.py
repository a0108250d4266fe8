"""Rewrites a loss so that each attention is one operation.

The rewrite precedes differentiation, so that autodiff uses the operation's own gradient. It descends into layers
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
    """What computes an attention: a platform's kernel, or None, plain; `detail` says of which sizes, or why."""

    kernel: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.kernel or 'plain'}{self.detail}"


def fuse_attention(
    function: Callable[..., Any], context: str = RING, outcomes: list[FusedAttention] | None = None
) -> Callable[..., Any]:
    """A pure function of arrays that computes the same, its attentions as operations.

    They can go around a ring; or, of those that the kernel which `context` names can take, be computed by it: the
    others stay as they are written.

    Args:
      function: the loss.
      context: `ring`, or the kernel.
      outcomes: is added what became of each attention that a kernel was asked for.

    Raises:
      SpanaxError: when called, if there is no attention in it, or one that cannot be taken so.

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
        seen: list[AttentionMatch | Mismatch] = []
        outs = _evaluate(jaxpr, consts, jax.tree.leaves(args), seen, context)
        if context == RING:
            _check(seen)
        elif outcomes is not None:
            outcomes.extend(_outcomes(seen, context))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


def _check(seen: Sequence[AttentionMatch | Mismatch]) -> None:
    refused = [one for one in seen if isinstance(one, Mismatch)]
    if refused:
        raise SpanaxError(
            f"an attention cannot go around a ring: it has {refused[0].why}.",
            where=refused[0].line.where,
            fix="no dropout on attention weights, or the gathered form: layout 'context'",
        )
    if not seen:
        raise SpanaxError(
            "nothing can go around a ring: the loss has no softmax attention.",
            where="two products with a softmax over one dim between them, in the loss or its layers",
            fix="the gathered form: layout 'context'",
        )


def _outcomes(seen: Sequence[AttentionMatch | Mismatch], kernel: str) -> list[FusedAttention]:
    """Returns what computes each attention."""
    where = lambda one: one.line.where  # noqa: E731
    return [
        FusedAttention(None, f" at {where(one)}: {one.why}")
        if isinstance(one, Mismatch)
        else FusedAttention(kernel, f" for {_name(one)}")
        for one in seen
    ] or [FusedAttention(None, ": the loss has no softmax attention")]


def _name(one: AttentionMatch) -> str:
    queries, keys = (one.form.sizes[label] for label in (one.form.queries, one.form.keys))
    is_causal = one.kernel is not None and one.kernel.is_causal
    return f"{queries:,} x {keys:,}" + " causal" * is_causal


def _fitted(lines: Lines, at: int, one: AttentionMatch | Mismatch, kernel: str) -> AttentionMatch | Mismatch:
    """An attention with the kernel that computes it, or why none does."""
    if isinstance(one, Mismatch):
        return one
    shapes = [jax.eval_shape(partial(canonical, order=order), lines.avals[value]) for value, order in one.operands]
    fitted = kernel_of(kernel, one.form, *shapes)
    return Mismatch(fitted.why, lines.lines[at]) if isinstance(fitted, Unfit) else replace(one, kernel=fitted)


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], seen: list[AttentionMatch | Mismatch], context: str
) -> list[Any]:
    lines = Lines.of(jaxpr, consts)
    found = attentions(lines)
    if context != RING:
        found = {at: _fitted(lines, at, one, context) for at, one in found.items()}
    seen += found.values()
    values = dict(lines.known) | dict(zip(lines.inputs, args, strict=True))
    for at in _needed(lines, found):
        line, one = lines.lines[at], found.get(at)
        with source_info_util.user_context(
            line.eqn.source_info.traceback,
            name_stack=source_info_util.current_name_stack() + line.eqn.source_info.name_stack,
        ):
            if isinstance(one, AttentionMatch):
                outs = [_attend(lines, line, one, values)]
            else:
                outs = _apply(line, [values[value] for value in line.ins], seen, context)
        values.update(zip(line.outs, outs, strict=True))
    return [values[value] for value in lines.outputs]


def _needed(lines: Lines, found: dict[int, AttentionMatch | Mismatch]) -> list[int]:
    """The lines that are still to be run: those that only made scores are not."""
    wanted, needed = set(lines.outputs), []
    for at in range(len(lines.lines) - 1, -1, -1):
        line, one = lines.lines[at], found.get(at)
        if line.eqn.effects or wanted.intersection(line.outs):
            needed.append(at)
            wanted.update(one.needs if isinstance(one, AttentionMatch) else line.ins)
    return needed[::-1]


def _attend(lines: Lines, line: Line, one: AttentionMatch, values: dict[int, Any]) -> Any:
    q, k, v = (canonical(values[value], order) for value, order in one.operands)
    (result,) = line.outs
    dtype = lines.avals[result].dtype
    out = attention(one.form, dtype, q, k, v, [values[value] for value in one.extras], one.kernel)
    return as_written(out, one.out, lines.shape(result))


def _apply(line: Line, ins: Sequence[Any], seen: list[AttentionMatch | Mismatch], context: str) -> list[Any]:
    eqn, name, params = line.eqn, line.name, dict(line.eqn.params)

    def inner(body: Any) -> Callable[..., list[Any]]:
        jaxpr, consts = opened(body)
        return lambda *args: _evaluate(jaxpr, consts, args, seen, context)

    if (remat := remat_of(eqn)) is not None:
        if not _holds(remat["jaxpr"]):
            return bind(eqn, ins, params)
        function = jax.checkpoint(inner(remat["jaxpr"]), policy=remat["policy"], prevent_cse=remat["prevent_cse"])
        found: list[Any] = function(*ins)
        return found
    if name == "scan" and _holds(params["jaxpr"]):
        return bind(eqn, ins, params | {"jaxpr": retraced(params["jaxpr"], inner(params["jaxpr"]))})
    if name == "cond" and any(map(_holds, params["branches"])):
        return bind(eqn, ins, params | {"branches": tuple(retraced(one, inner(one)) for one in params["branches"])})
    return bind(eqn, ins, params)


def _holds(body: Any) -> bool:
    """Whether there is a product in a body, however deep: without one nothing is to be found there."""
    jaxpr, _ = opened(body)
    return any(eqn.primitive.name == "dot_general" or any(map(_holds, _bodies(eqn))) for eqn in jaxpr.eqns)


def _bodies(eqn: core.JaxprEqn) -> list[Any]:
    params = remat_of(eqn) or eqn.params
    held = [one for value in params.values() for one in (value if isinstance(value, tuple | list) else (value,))]
    return [one for one in held if hasattr(opened(one)[0], "eqns")]
