"""Rewrites a loss so that its matmuls and convolutions take operands of the compute dtype.

Parameters and batch in the compute dtype are not enough: one value in float32, such as a table of rotary positions or
the result of a `nnx.Embed` without a dtype, makes every value after it float32. The rewrite precedes differentiation,
so that gradients are computed in the compute dtype, too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from spanax.trace.jaxpr.dim_maps.table import DECOMPOSITIONS
from spanax.trace.jaxpr.graph import CALLS, CONTRACTIONS, Body, Graph, Op, contains, from_jaxpr, remat_of
from spanax.trace.jaxpr.interpret import evaluate, with_bodies

NARROWER = ("bfloat16", "float16")
"""Compute dtypes to which the operands of matmuls are cast."""

WIDE = frozenset(DECOMPOSITIONS.split())
"""Primitives that have no narrower dtype than float32."""

EXACT = ("HIGH", "HIGHEST")
"""Values of `precision` with which a model asks for a matmul in float32."""


def matmuls_in(function: Callable[..., Any], dtype: str | None) -> Callable[..., Any]:
    """Returns a pure function whose matmuls and convolutions of float32 operands cast them to a narrower dtype.

    Their results are cast back, so that all other operations, such as norms and softmax, keep their dtypes. A matmul
    with `precision="high"` or `"highest"` stays in float32, and so does the inside of a function with a custom
    derivative. A dtype that is not one of `NARROWER` returns `function` unchanged.

    Raises:
      TypeError: when called: a decomposition of a matrix, such as `jnp.linalg.slogdet`, has operands of the dtype.

    Example:
      >>> def loss(weight, x):
      ...     return jax.nn.softmax(x @ weight).var()
      >>> weight, x = jax.ShapeDtypeStruct((8, 4), "bfloat16"), jax.ShapeDtypeStruct((2, 8), "float32")
      >>> jaxpr = jax.make_jaxpr(matmuls_in(loss, "bfloat16"))(weight, x)
      >>> [eqn.outvars[0].aval.str_short() for eqn in jaxpr.eqns if eqn.primitive.name in ("dot_general", "exp")]
      ['bfloat16[2,4]', 'float32[2,4]']
    """
    if dtype not in NARROWER:
        return function

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        graph = from_jaxpr(closed, CALLS, as_traced=True)
        _check_decompositions(graph, dtype)
        results = _evaluate(graph, dtype, graph.body, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _check_decompositions(graph: Graph, dtype: str) -> None:
    """Raises for what no platform compiles in a narrow dtype; JAX from 0.12 on raises as it traces."""

    def is_narrow(eqn: Any) -> bool:
        return eqn.primitive.name in WIDE and any(str(var.aval.dtype) == dtype for var in eqn.invars)

    for op in graph.ops():
        # The operations of bodies follow.
        if is_narrow(op.eqn) or (not op.bodies and contains(op.eqn, is_narrow)):
            raise TypeError(f"the decomposition of a matrix at {op.where} has no {dtype}")


def _evaluate(graph: Graph, dtype: str, body: Body, args: Sequence[Any]) -> Sequence[Any]:
    """Returns the outputs of a body, with its matmuls in a dtype."""

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        if op.name in CONTRACTIONS:
            return _contracted(op, ins, dtype)
        is_followed = op.name in ("scan", "while", "cond") or remat_of(op.eqn) is not None
        if is_followed and contains(op.eqn, lambda eqn: eqn.primitive.name in CONTRACTIONS):
            return with_bodies(op, ins, partial(_evaluate, graph, dtype))
        return None

    return evaluate(graph.within(body), args, override)


def _contracted(op: Op, ins: Sequence[Any], dtype: str) -> Sequence[Any] | None:
    """Returns the results of a matmul of float32 operands, computed in a dtype; None for any other."""
    floating = [array.dtype for array in ins if jnp.issubdtype(array.dtype, jnp.floating)]
    precision = op.params.get("precision")
    names = {getattr(each, "name", "") for each in (precision if isinstance(precision, tuple) else (precision,))}
    if jnp.float32 not in floating or not names.isdisjoint(EXACT):
        return None
    operands = [array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array for array in ins]
    outs = op.bind(operands, op.params | {"preferred_element_type": jnp.dtype(dtype)})
    return [out.astype(jnp.float32) for out in outs]
