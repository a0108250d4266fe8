"""Applies a rematerialization policy to the layers of a loss.

A layer is the body of an outermost scan that contains a contraction, or a function the author wrapped in `nnx.remat`.
The function is traced and its jaxpr is evaluated with every layer under the policy. Values outside layers are saved.

A partial policy is for the first layers only: a scan with more layers is evaluated as two scans, one after the other.
The first layers, because the backward pass recomputes them last, when the activations of the others are freed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from spanax.errors import RangeError, VariantError
from spanax.trace.jaxpr.graph import (
    CALLS,
    CANDIDATE,
    CONTRACTIONS,
    LAYER_PARTS,
    LOSS_CHUNKS,
    PREFIX,
    PRODUCT,
    SAVED,
    Body,
    Graph,
    Op,
    contains,
    from_jaxpr,
    remat_of,
    scan_counts,
)
from spanax.trace.jaxpr.interpret import Override, evaluate, rematted, with_bodies
from spanax.trace.jaxpr.remat_policies import INPUT, NAMED, ROWS, PartialPolicy, partial_policy, saved_values
from spanax.trace.rewrites.attention.operation import attention_of, named
from spanax.trace.rewrites.traced_once import jaxpr_of

ATTENTION = "attention"
"""The name, with a number, of the results of fused attention: with them, its gradient computes no scores again."""


def rematerialized(function: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
    """Returns an equivalent pure function that saves for its gradient what the policy allows.

    Functions with a custom derivative (`jax.custom_vjp`) are left unchanged, with any remat inside them. A function
    without layers is treated as one layer, except under `full`, where that would not reduce peak memory.

    Args:
      function: takes and returns pytrees of arrays.
      policy: one of `POLICIES`, values as `saved_values`, or a partial policy such as `dots:8`; None returns `function`
        unchanged.

    Raises:
      SpanaxError: when called, if the policy is `full`, partial or lists values and the loss has no layer, if a partial
        policy names all of its layers, or more, or if the layers compute no value that it lists.

    Example:
      >>> def loss(weights, x):
      ...     return jax.lax.scan(lambda x, w: (jax.numpy.sin(x @ w), None), x, weights)[0].sum()
      >>> weights, x = jax.ShapeDtypeStruct((3, 8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
      >>> str(jax.make_jaxpr(rematerialized(loss, "dots"))(weights, x)).count("remat2[")
      1
    """
    if policy is None:
        return function

    def run(*args: Any) -> Any:
        closed, shapes = jaxpr_of(function, *args)
        graph = from_jaxpr(closed, frozenset(), as_traced=True)
        parts = partial_policy(policy)
        override = _layers_under(graph, policy, in_layer=policy == "none") if parts is None else _partial(graph, parts)
        results: Callable[..., list[Any]] = lambda *leaves: evaluate(graph, leaves, override)  # noqa: E731
        if parts is None and policy != "none" and not _has_layers(graph.body):
            if policy in ("full", NAMED) or saved_values(policy):
                raise _no_layer(policy)
            results = jax.checkpoint(results, policy=_saveable(policy))
        return jax.tree.unflatten(jax.tree.structure(shapes), results(*jax.tree.leaves(args)))

    return run


def _no_layer(policy: str) -> VariantError:
    return VariantError(
        f"remat '{policy}' has no layer to rematerialize: the loss has no scan with a matmul, and no remat.",
        fix="spanax.stack(model) where it has a list of blocks, nnx.remat around one, or remat='dots'",
    )


def _saveable(policy: str) -> Callable[..., Any]:
    """Returns the JAX policy. Convolutions count as matmuls: otherwise a CNN would recompute everything.

    Source: https://docs.jax.dev/en/latest/gradient-checkpointing.html, "List of policies".
    """
    policies = jax.checkpoint_policies
    if policy == "full":
        return policies.nothing_saveable
    if places := saved_values(policy):
        on_device, on_host = (
            [PREFIX + SAVED + name for name, place in places.items() if place == is_on_host]
            for is_on_host in (False, True)
        )
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*on_device, *(name + ROWS for name in (*on_device, *on_host))],
            names_which_can_be_offloaded=on_host,
            offload_src="device",
            offload_dst="pinned_host",
        )
    dots_policy = policies.dots_with_no_batch_dims_saveable

    def saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
        # JAX 0.10 to 0.12 rounds what a remat saves with `reduce_precision`, which does not accept complex dtypes.
        if any(jax.dtypes.issubdtype(getattr(aval, "dtype", np.void), np.complexfloating) for aval in avals):
            return False
        if primitive.name == "name" and params["name"].startswith(PREFIX + PRODUCT):
            return dots_policy(jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))
        if primitive.name == "name":  # a chunked loss computes its gradients in the forward pass
            return params["name"] == LOSS_CHUNKS
        if any(getattr(aval, "dtype", np.dtype("float32")).itemsize == 1 for aval in avals):
            return False  # of a quantized matmul the marked result is saved
        if primitive.name in CONTRACTIONS and primitive.name != "dot_general":
            return dots_policy(jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))
        return dots_policy(primitive, *avals, **params)

    return saveable


def _layers_under(graph: Graph, policy: str, *, in_layer: bool) -> Override:
    """Returns the override that evaluates layers, and operations that contain layers, under the policy."""
    marks = _marks(graph, policy)

    def marking(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        if _is_transparent(op):
            return evaluate(graph.within(op.bodies[0]), ins, marking)
        return named(op, ins, marks[op]) if op in marks else None

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        is_layer = _is_layer(op, in_layer)
        if not is_layer and not any(_has_layers(body, in_layer) for body in _followed(op)):
            return None
        if (policy == "none" or marks) and _runs_chunks(op):
            return None  # a remat of chunks is not the model's

        def inner(body: Body, args: Sequence[Any]) -> Sequence[Any]:
            further = marking if marks and is_layer else _layers_under(graph, policy, in_layer=in_layer or is_layer)
            pairs = zip(body.inputs, args, strict=True)
            args = [checkpoint_name(arg, marks[value]) if value in marks else arg for value, arg in pairs]
            return evaluate(graph.within(body), args, further)

        def saving(body: Body, args: Sequence[Any], *, prevent_cse: bool) -> Sequence[Any]:
            remat = {"policy": _saveable(policy), "prevent_cse": prevent_cse}
            return rematted(remat, lambda *args: inner(body, args))(*args)

        remat = remat_of(op.eqn)
        if op.name in CALLS or (remat is not None and policy in ("none", NAMED)):
            return inner(op.bodies[0], ins)
        if remat is not None:
            return saving(op.bodies[0], ins, prevent_cse=remat["prevent_cse"])
        # A body that is a single remat already has the policy. Inside a loop, CSE cannot undo the remat.
        is_remat = not marks and [_is_layer(body_op, True) for body_op in op.bodies[0].ops] == [True]
        is_saving = is_layer and not is_remat and policy != NAMED
        return with_bodies(op, ins, partial(saving, prevent_cse=False) if is_saving else inner)

    return override


def _marks(graph: Graph, policy: str) -> dict[Op | int, str]:
    """Returns the names under which a policy saves the results of operations in layers; remats in them are ignored.

    A name is the primitive with its number in the order of the operations of all layers. Those of fused attention are
    ignored where none is fused, as in the first trace of a program. Inputs of layers have names by their values.

    Raises:
      SpanaxError: the layers compute no value of a name.
    """
    saved = saved_values(policy)
    layers = [layer for layer, _ in _layers(graph.body)]
    if not layers or (not saved and policy != NAMED):
        return {}
    counts = Counter[str]()
    names = dict[str, Op | int]()
    for value in (value for layer in layers for value, _ in graph.wires(layer).carried):
        if _can_be_saved(graph.avals[value]):
            counts[INPUT] += 1
            names[f"{INPUT}.{counts[INPUT]}"] = value
    pending = [op for layer in layers for op in layer.bodies[0].ops]
    while pending:
        op = pending.pop(0)
        if _is_transparent(op):
            pending[:0] = op.bodies[0].ops
        elif all(_can_be_saved(var.aval) for var in op.eqn.outvars):
            name = op.name if attention_of(op) is None else ATTENTION
            counts[name] += 1
            names[f"{name}.{counts[name]}"] = op
    if policy == NAMED:
        return {op: CANDIDATE + name for name, op in names.items()}
    known = [name for name in saved if counts[ATTENTION] or not name.startswith(ATTENTION)]
    missing = next((name for name in known if name not in names), None)
    if missing is not None:
        most = ", ".join(f"{name}.{number}" for name, number in counts.most_common(4))
        raise RangeError(f"remat '{policy[:40]}': the layers compute no '{missing}'.", fix=f"values up to {most}")
    return {names[name]: PREFIX + SAVED + name for name in known}


def _is_transparent(op: Op) -> bool:
    """Whether the values inside an operation are values of the layer around it."""
    return op.name in CALLS or remat_of(op.eqn) is not None


def _can_be_saved(aval: Any) -> bool:
    """Whether a value has a dtype that a remat can save, as in `_saveable`, and is larger than a number."""
    dtype = getattr(aval, "dtype", np.void)
    return bool(aval.shape) and any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.bool_, np.floating))


def _partial(graph: Graph, policy: PartialPolicy) -> Override:
    """Returns the override that evaluates the first layers under one policy, and all others under another."""
    layers = dict(_layers(graph.body))
    shares = dict[Op, int]()
    left = policy.num_layers
    total = sum(layers.values())
    if not layers:
        raise _no_layer(str(policy))
    if left >= total:
        near = f", or '{replace(policy, num_layers=total - 1)}'" if total > 1 else ""
        what = f"remat '{policy}' is for the first {left} layers, and the loss has {total}."
        raise RangeError(what, fix=f"'{policy.first}' for all layers{near}")
    for op, count in layers.items():
        shares[op] = min(left, count)
        left -= shares[op]
    first, others = (_layers_under(graph, name, in_layer=name == "none") for name in (policy.first, policy.others))

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        share = shares.get(op)
        if share is not None and 0 < share < layers[op]:
            return _in_two_parts(graph, op, ins, share, (first, others))
        if share is not None or _runs_chunks(op):
            return (first if share else others)(op, ins)
        if not any(_has_layers(body) for body in _followed(op)):
            return None

        def inner(body: Body, args: Sequence[Any]) -> Sequence[Any]:
            return evaluate(graph.within(body), args, override)

        return inner(op.bodies[0], ins) if op.name in CALLS else with_bodies(op, ins, inner)

    return override


def _layers(body: Body) -> Iterator[tuple[Op, int]]:
    """Yields the outermost operations that run layers, each with their number, in order; not chunks of a loss."""
    for op in body.ops:
        if _is_layer(op, False):
            if not _runs_chunks(op):
                yield op, op.params["length"] if op.name == "scan" else 1
        else:
            for inner in _followed(op):
                yield from _layers(inner)


def _runs_chunks(op: Op) -> bool:
    return op.name == "scan" and LOSS_CHUNKS in str(op.eqn.source_info.name_stack)


def _in_two_parts(
    graph: Graph, op: Op, ins: Sequence[Any], count: int, overrides: tuple[Override, Override]
) -> list[Any]:
    """Evaluates a scan as two: its first iterations under one override, then the others under another."""
    num_consts, num_carried = scan_counts(graph, op)
    length = op.params["length"]
    is_reverse = op.params["reverse"]
    consts = ins[:num_consts]
    carry = ins[num_consts:][:num_carried]
    rows = ins[num_consts + num_carried :]
    bounds = [(length - count, length), (0, length - count)] if is_reverse else [(0, count), (count, length)]
    parts = list[Sequence[Any]]()
    for (start, end), override in zip(bounds, overrides, strict=True):
        with jax.named_scope(LAYER_PARTS):
            some = [jax.lax.slice_in_dim(row, start, end) for row in rows]
        part = replace(op, eqn=op.eqn.replace(params={**op.params, "length": end - start}))
        operands = [*consts, *carry, *some]
        outs = override(part, operands)
        outs = part.bind(operands) if outs is None else outs
        carry = outs[:num_carried]
        parts.append(outs[num_carried:])
    with jax.named_scope(LAYER_PARTS):
        pairs = zip(*(reversed(parts) if is_reverse else parts), strict=True)
        return [*carry, *(jax.lax.concatenate(pair, 0) for pair in pairs)]


def _has_layers(body: Body, in_layer: bool = False) -> bool:
    """Whether the policy applies to a body: it contains a layer or, inside a layer, a remat."""
    return any(
        _is_layer(op, in_layer) or any(_has_layers(inner, in_layer) for inner in _followed(op)) for op in body.ops
    )


def _is_layer(op: Op, in_layer: bool) -> bool:
    if (remat := remat_of(op.eqn)) is not None:
        # A differentiated remat is not a layer but the backward pass of a gradient inside the loss.
        return not remat["differentiated"]
    contracts = op.name == "scan" and not in_layer
    return contracts and contains(op.eqn, lambda eqn: eqn.primitive.name in CONTRACTIONS)


def _followed(op: Op) -> tuple[Body, ...]:
    """Returns the bodies of an operation that are searched for layers; none with a derivative rule of their own."""
    return op.bodies if op.name in CALLS | {"scan", "cond"} else ()
