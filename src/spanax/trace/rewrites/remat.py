"""Applies a rematerialization policy to the layers of a loss.

A layer is the body of an outermost scan that contains a contraction, or a function the author wrapped in `nnx.remat`.
The function is traced and its jaxpr is evaluated with every layer under the policy. Values outside layers are saved.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from spanax.errors import SpanaxError
from spanax.trace.jaxpr.graph import CONTRACTIONS, bind, opened, remat_of, retraced
from spanax.trace.rewrites.chunked_loss.chunked import CHUNKS

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})
"""Calls without a custom derivative; layers are searched for inside them."""


def rematerialized(function: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
    """Returns an equivalent pure function that saves for its gradient what the policy allows.

    Functions with a custom derivative (`jax.custom_vjp`) are left unchanged, with any remat inside them. A function
    without layers is treated as one layer, except under `full`, where that would not reduce peak memory.

    Args:
      function: takes and returns pytrees of arrays.
      policy: one of `POLICIES`; None returns `function` unchanged.

    Raises:
      SpanaxError: when called, if the policy is `full` and there is no layer.

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
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        jaxpr, consts = opened(closed)

        def evaluate(*leaves: Any) -> list[Any]:
            return _evaluate(jaxpr, consts, leaves, policy, in_layer=policy == "none")

        if policy != "none" and not _has_layers(jaxpr):
            if policy == "full":
                raise SpanaxError(
                    "remat 'full' finds no layer to forget: the loss has no scan that contracts, and no remat.",
                    fix="spanax.stack(model) where it has a list of blocks, nnx.remat around one, or remat='dots'",
                )
            evaluate = jax.checkpoint(evaluate, policy=_saveable(policy))
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(*jax.tree.leaves(args)))

    return run


def _saveable(policy: str) -> Callable[..., Any]:
    """Returns the JAX policy. Convolutions count as matmuls: otherwise a CNN would recompute everything.

    Source: https://docs.jax.dev/en/latest/gradient-checkpointing.html, "List of policies".
    """
    policies = jax.checkpoint_policies
    if policy == "full":
        return policies.nothing_saveable
    dots = policies.dots_with_no_batch_dims_saveable
    dots_policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host") if policy == "offload" else dots

    def saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "name":  # a chunked loss computes its gradients in the forward pass
            return params["name"] == CHUNKS
        if primitive.name in CONTRACTIONS and primitive.name != "dot_general":
            return dots_policy(jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))
        return dots_policy(primitive, *avals, **params)

    return saveable


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], policy: str, *, in_layer: bool
) -> list[Any]:
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        outs = _apply(eqn, [read(atom) for atom in eqn.invars], policy, in_layer)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: core.JaxprEqn, ins: Sequence[Any], policy: str, in_layer: bool) -> list[Any]:
    """Evaluates one equation with its bodies under the policy."""
    name, params = eqn.primitive.name, dict(eqn.params)
    is_layer = _is_layer(eqn, in_layer)
    if not is_layer and not any(_has_layers(opened(body)[0], in_layer) for body in _followed(eqn)):
        return bind(eqn, ins, params)

    def inner(body: Any) -> Callable[..., list[Any]]:
        jaxpr, consts = opened(body)
        return lambda *args: _evaluate(jaxpr, consts, args, policy, in_layer=in_layer or is_layer)

    if name in CALLS:
        return inner(_called(eqn))(*ins)
    if (remat := remat_of(eqn)) is not None:
        body = inner(remat["jaxpr"])
        if policy == "none":
            return body(*ins)
        return jax.checkpoint(body, policy=_saveable(policy), prevent_cse=remat["prevent_cse"])(*ins)
    if name == "scan":
        body = inner(params["jaxpr"])
        if is_layer and [_is_layer(body_eqn, True) for body_eqn in opened(params["jaxpr"])[0].eqns] != [True]:
            # A body that is a single remat already has the policy. Inside a loop, CSE cannot undo the remat.
            body = jax.checkpoint(body, policy=_saveable(policy), prevent_cse=False)
        return bind(eqn, ins, params | {"jaxpr": retraced(params["jaxpr"], body)})
    return bind(
        eqn, ins, params | {"branches": tuple(retraced(branch, inner(branch)) for branch in params["branches"])}
    )


def _has_layers(jaxpr: core.Jaxpr, in_layer: bool = False) -> bool:
    """Whether the policy applies to a jaxpr: it contains a layer or, inside a layer, a remat."""
    return any(
        _is_layer(eqn, in_layer) or any(_has_layers(opened(body)[0], in_layer) for body in _followed(eqn))
        for eqn in jaxpr.eqns
    )


def _is_layer(eqn: core.JaxprEqn, in_layer: bool) -> bool:
    if (remat := remat_of(eqn)) is not None:
        # A differentiated remat is not a layer but the backward pass of a gradient inside the loss.
        return not remat["differentiated"]
    return eqn.primitive.name == "scan" and not in_layer and _contracts(opened(eqn.params["jaxpr"])[0])


def _followed(eqn: core.JaxprEqn) -> Sequence[Any]:
    """Returns the bodies of an equation that are searched for layers."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return [_called(eqn)]
    return [params["jaxpr"]] if name == "scan" else params["branches"] if name == "cond" else ()


def _called(eqn: core.JaxprEqn) -> Any:
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def _contracts(jaxpr: core.Jaxpr) -> bool:
    """Whether a jaxpr contains a matmul or a convolution at any depth."""
    return any(eqn.primitive.name in CONTRACTIONS or any(map(_contracts, _bodies(eqn))) for eqn in jaxpr.eqns)


def _bodies(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    params = remat_of(eqn) or eqn.params
    bodies = [body for value in params.values() for body in (value if isinstance(value, tuple | list) else (value,))]
    return [opened(body)[0] for body in bodies if hasattr(opened(body)[0], "eqns")]
