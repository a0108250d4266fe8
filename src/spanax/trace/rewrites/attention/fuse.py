"""Rewrites a loss so that each attention is one operation.

The rewrite precedes differentiation, so that autodiff uses the gradient of the operation. It descends into layers
(scan, remat, cond). Functions with a custom derivative are left unchanged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from spanax.errors import VariantError
from spanax.trace.jaxpr.graph import CALLS, Body, Graph, Op, contains, from_jaxpr, remat_of
from spanax.trace.jaxpr.interpret import evaluate, rebuilt, with_bodies
from spanax.trace.jaxpr.provenance import Origin, origins
from spanax.trace.jaxpr.remat_policies import BLOCKWISE, RING, ULYSSES
from spanax.trace.rewrites.attention.blockwise import block_size
from spanax.trace.rewrites.attention.kernel_form import with_operands
from spanax.trace.rewrites.attention.kernels import Unfit, kernel_of
from spanax.trace.rewrites.attention.match import (
    AttentionMatch,
    Mismatch,
    Outside,
    as_written,
    attentions,
    canonical,
    outside_of,
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
        graph = from_jaxpr(closed, CALLS, as_traced=True)
        num_leaves = len(jax.tree.leaves(args[:num_states]))
        seeds = dict.fromkeys((*graph.body.inputs[num_leaves:], *graph.captured), Origin.BATCH)
        examples = {value for value, origin in enumerate(origins(graph, seeds)) if origin}
        found = _found(graph, context, examples, {})
        matches = [*found.all()]
        outs = _evaluate(graph, jax.tree.leaves(args), found, {})
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


@dataclass(frozen=True)
class _Attentions:
    """The attentions of a body.

    Attributes:
      own: by the operation of the second product.
      inside: those of the bodies of its operations.
      reads: the values outside of the body that they read, of masks that a layer computes for itself.
    """

    own: Mapping[Op, AttentionMatch | Mismatch]
    inside: Mapping[Op, "list[_Attentions]"]
    reads: frozenset[int]

    def all(self) -> Iterator[AttentionMatch | Mismatch]:
        """Yields all attentions, also those inside."""
        yield from self.own.values()
        for bodies in self.inside.values():
            for each in bodies:
                yield from each.all()


def _found(graph: Graph, context: str, examples: set[int], outside: Outside) -> _Attentions:
    """Returns the attentions of a graph: products with a softmax between them, of keys or values in `examples`."""
    own = {
        op: match
        for op, match in attentions(graph, outside).items()
        if isinstance(match, Mismatch) or examples.intersection(value for value, _ in match.operands[1:])
    }
    if context not in (RING, ULYSSES):
        own = {op: _fitted(graph, op, match, context) for op, match in own.items()}
    inside = dict[Op, list[_Attentions]]()
    for op in graph.body.ops:
        is_followed = op.name in ("scan", "cond") or remat_of(op.eqn) is not None
        if is_followed and contains(op.eqn, lambda eqn: eqn.primitive.name == "dot_general"):
            known = outside_of(graph, op, outside)
            inside[op] = [_found(graph.within(body), context, examples, known) for body in op.bodies]
    needs = {value for match in own.values() if isinstance(match, AttentionMatch) for value in match.needs}
    needs |= {value for bodies in inside.values() for each in bodies for value in each.reads}
    known_here = {*graph.body.inputs, *graph.producers, *graph.constants}
    return _Attentions(own, inside, frozenset(needs - known_here))


def _evaluate(graph: Graph, args: Sequence[Any], found: _Attentions, arrays: Mapping[int, Any]) -> Sequence[Any]:
    """Evaluates a graph with each attention as one operation, without those that only produce its scores.

    `arrays` are the values that it reads of the bodies around it.
    """
    matched = {op: match for op, match in found.own.items() if isinstance(match, AttentionMatch)}
    reads = {op: sorted({value for each in bodies for value in each.reads}) for op, bodies in found.inside.items()}
    replaced = {op: replace(op, inputs=match.needs) for op, match in matched.items()}
    replaced |= {op: replace(op, inputs=(*op.inputs, *values)) for op, values in reads.items() if values}
    originals = {new: op for op, new in replaced.items()}
    graph = replace(
        graph,
        body=replace(graph.body, ops=tuple(replaced.get(op, op) for op in graph.body.ops)),
        constants={**graph.constants, **arrays},
    )

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        original = originals.get(op, op)
        if original in matched:
            return [_attend(graph, op, matched[original], ins)]
        if original not in found.inside:
            return None
        own = ins[: len(original.inputs)]
        outer = dict(zip(reads[original], ins[len(own) :], strict=True))
        by_body: dict[Body, _Attentions] = dict(zip(original.bodies, found.inside[original], strict=True))

        def inner(body: Body, args: Sequence[Any]) -> Sequence[Any]:
            return _evaluate(graph.within(body), args, by_body[body], outer)

        if not outer:
            return with_bodies(original, own, inner)
        return rebuilt(graph, original, own, [partial(_on, inner, body) for body in original.bodies])

    needed = graph.slice(graph.body.outputs, roots=[op for op in graph.body.ops if op.eqn.effects])
    return evaluate(graph, args, override, needed)


def _on(function: Callable[[Body, Sequence[Any]], Sequence[Any]], body: Body, *args: Any) -> Sequence[Any]:
    return function(body, args)


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
