"""Rewrites a loss so that each attention is one operation.

The rewrite precedes differentiation, so that autodiff uses the gradient of the operation. It descends into layers
(scan, remat, cond). Functions with a custom derivative are left unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from spanax.errors import VariantError
from spanax.trace.jaxpr.graph import CALLS, Graph, Op, contains, from_jaxpr, remat_of
from spanax.trace.jaxpr.interpret import evaluate, with_bodies
from spanax.trace.jaxpr.provenance import Origin, origins
from spanax.trace.jaxpr.remat_policies import BLOCKWISE, RING, ULYSSES
from spanax.trace.rewrites.attention.blockwise import block_size
from spanax.trace.rewrites.attention.kernel_form import with_operands
from spanax.trace.rewrites.attention.kernels import Unfit, kernel_of
from spanax.trace.rewrites.attention.match import (
    AttentionMatch,
    Mismatch,
    Positions,
    as_written,
    attentions,
    canonical,
    positions_in,
)
from spanax.trace.rewrites.attention.operation import attention
from spanax.trace.rewrites.traced_once import jaxpr_of


@dataclass(frozen=True)
class FusedAttention:
    """The implementation of one attention: a kernel, `blockwise`, or None for plain; `detail` has sizes, or why."""

    kernel: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.kernel or 'plain'}{self.detail}"


def fuse_attention(
    function: Callable[..., Any],
    context: str = RING,
    outcomes: list[FusedAttention] | None = None,
    num_states: int = 0,
) -> Callable[..., Any]:
    """Returns an equivalent pure function in which each attention is one operation.

    With `ring` or `ulysses`, every attention must match. With a kernel, attentions that it does not support are
    computed in blocks of their keys, or left unchanged where they have one block.

    Args:
      function: the loss.
      context: `ring`, `ulysses`, the name of the kernel, or `blockwise`.
      outcomes: receives the implementation of each attention if a kernel is requested.
      num_states: the number of leading arguments that have no examples, such as parameters. Two products with a
        softmax between them are no attention if keys and values depend on these alone: a head of classes, then another.

    Raises:
      SpanaxError: when called with `ring` or `ulysses`, if the loss has no attention, or one that does not match.

    Example:
      >>> def loss(q, k, v):
      ...     return jax.nn.dot_product_attention(q, k, v, is_causal=True).sum()
      >>> q = k = v = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")
      >>> str(jax.make_jaxpr(fuse_attention(loss))(q, k, v)).count("= spanax_attention[")
      1
    """

    def fused(*args: Any) -> Any:
        closed, shapes = jaxpr_of(function, *args)
        matches: list[AttentionMatch | Mismatch] = []
        graph = from_jaxpr(closed, CALLS, as_traced=True)
        num_leaves = len(jax.tree.leaves(args[:num_states]))
        seeds = dict.fromkeys((*graph.body.inputs[num_leaves:], *graph.captured), Origin.BATCH)
        examples = {value for value, origin in enumerate(origins(graph, seeds)) if origin}
        outs = _evaluate(graph, jax.tree.leaves(args), matches, context, examples, {})
        if context in (RING, ULYSSES):
            _check(matches, context)
        elif outcomes is not None:
            outcomes.extend(_outcomes(matches, context))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return fused


def _check(matches: Sequence[AttentionMatch | Mismatch], context: str) -> None:
    mismatches = [match for match in matches if isinstance(match, Mismatch)]
    if mismatches:
        raise VariantError(
            f"an attention does not support the {context} form: it has {mismatches[0].why}.",
            where=mismatches[0].op.where,
            fix="no dropout on attention weights, or the gathered form: layout 'context'",
        )
    if not matches:
        raise VariantError(
            f"the {context} form requires attention: the loss has no softmax attention.",
            where="two products with a softmax over one dim between them, in the loss or its layers",
            fix="layout 'data', or 'context', which gathers a sequence",
        )


def _outcomes(matches: Sequence[AttentionMatch | Mismatch], kernel: str) -> list[FusedAttention]:
    """Returns the implementation of each attention."""
    location = lambda match: match.op.where.rpartition("/")[2]  # noqa: E731  (a reason in prose, without folders)
    outcomes = []
    for match in matches:
        if isinstance(match, Mismatch):
            outcomes.append(FusedAttention(None, f" at {location(match)}: {match.why}"))
        elif match.kernel is None:
            outcomes.append(FusedAttention(BLOCKWISE, f" for {_name(match)} at {location(match)}{match.why}"))
        else:
            outcomes.append(FusedAttention(kernel, f" for {_name(match)}"))
    return outcomes or [FusedAttention(None, ": the loss has no softmax attention")]


def _name(match: AttentionMatch) -> str:
    queries, keys = (match.form.sizes[label] for label in (match.form.queries, match.form.keys))
    mask = match.kernel.mask if match.kernel is not None else ""
    return f"{queries:,} x {keys:,} {mask}".rstrip()


def _fitted(graph: Graph, op: Op, match: AttentionMatch | Mismatch, kernel: str) -> AttentionMatch | Mismatch:
    """Returns an attention with its kernel, else in blocks; or why neither supports it."""
    if isinstance(match, Mismatch):
        return match
    keys = match.form.sizes[match.form.keys]
    why = ""
    if kernel != BLOCKWISE:
        shapes = [
            jax.eval_shape(partial(canonical, order=order), graph.avals[value]) for value, order in match.operands
        ]
        fit = kernel_of(kernel, match.form, *shapes)
        if not isinstance(fit, Unfit):
            return replace(match, kernel=fit)
        why = fit.why
    if block_size(keys) == keys:
        return Mismatch(why or f"its {keys:,} keys are one block", op)
    return replace(match, op=op, why=f": {why}" * bool(why))


def _evaluate(
    graph: Graph,
    args: Sequence[Any],
    matches: list[AttentionMatch | Mismatch],
    context: str,
    examples: set[int],
    outside: Positions,
) -> Sequence[Any]:
    """Evaluates a graph with each attention as one operation, without those that only produce its scores.

    Of the products with a softmax between them, those are attentions whose keys or values are in `examples`.
    """
    fused = {
        op: match
        for op, match in attentions(graph, outside).items()
        if isinstance(match, Mismatch) or examples.intersection(value for value, _ in match.operands[1:])
    }
    if context not in (RING, ULYSSES):
        fused = {op: _fitted(graph, op, match, context) for op, match in fused.items()}
    matches += fused.values()
    matched = {op: match for op, match in fused.items() if isinstance(match, AttentionMatch)}
    replaced = {op: replace(op, inputs=match.needs) for op, match in matched.items()}
    attended = {replaced[op]: match for op, match in matched.items()}
    graph = graph.within(replace(graph.body, ops=tuple(replaced.get(op, op) for op in graph.body.ops)))

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        if op in attended:
            return [_attend(graph, op, attended[op], ins)]
        is_followed = op.name in ("scan", "cond") or remat_of(op.eqn) is not None
        if not is_followed or not contains(op.eqn, lambda eqn: eqn.primitive.name == "dot_general"):
            return None
        inside = positions_in(graph, op, outside)
        rest = (matches, context, examples, inside)
        return with_bodies(op, ins, lambda body, args: _evaluate(graph.within(body), args, *rest))

    needed = graph.slice(graph.body.outputs, roots=[op for op in graph.body.ops if op.eqn.effects])
    return evaluate(graph, args, override, needed)


def _attend(graph: Graph, op: Op, match: AttentionMatch, ins: Sequence[Any]) -> Any:
    q, k, v = (canonical(array, order) for array, (_, order) in zip(ins, match.operands, strict=False))
    (result,) = op.outputs
    dtype = graph.avals[result].dtype
    form = match.form
    extras = ins[len(match.operands) :]
    if match.kernel is not None and (extras or match.kernel.has_ids or match.kernel.has_sink):
        form, extras = with_operands(form, match.kernel, extras)
    out = attention(form, dtype, q, k, v, extras, match.kernel)
    return as_written(out, match.out, graph.shape(result))
