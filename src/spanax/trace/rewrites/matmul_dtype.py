"""Rewrites a loss so that its matmuls take operands of the compute dtype, and those of weights quantized operands.

Parameters and batch in the compute dtype are not enough: one value in float32, such as a table of rotary positions or
the result of a `nnx.Embed` without a dtype, makes every value after it float32. The rewrite precedes differentiation,
so that gradients are computed in the compute dtype, too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spanax.errors import VariantError
from spanax.trace.jaxpr.dim_maps.table import DECOMPOSITIONS
from spanax.trace.jaxpr.graph import (
    CALLS,
    CONTRACTIONS,
    PRODUCT,
    QUANTIZED,
    Body,
    Graph,
    Op,
    contains,
    from_jaxpr,
    marked,
    remat_of,
)
from spanax.trace.jaxpr.interpret import evaluate, with_bodies
from spanax.trace.rewrites.quantized_matmul import RECIPES, Recipe, quantized_matmul
from spanax.trace.rewrites.weight_matmuls import weight_matmuls

NARROWER = ("bfloat16", "float16")
"""Compute dtypes to which the operands of matmuls are cast."""

WIDE = frozenset(DECOMPOSITIONS.split())
"""Primitives that have no narrower dtype than float32."""

EXACT = ("HIGH", "HIGHEST")
"""Values of `precision` with which a model asks for a matmul in float32."""


class MatmulDtypes(NamedTuple):
    """The dtypes in which a loss computes its matmuls.

    Attributes:
      compute: that of floating parameters and batch, and of the operands of matmuls; None for their own dtypes.
      quantize: the recipe, one of `RECIPES`, of the matmuls of weights; None for none.
    """

    compute: str | None = None
    quantize: str | None = None


class _Rewrite(NamedTuple):
    """What a rewrite changes: the dtype of matmuls, if any, and the matmuls to quantize, with the paths of weights."""

    dtype: str | None
    recipe: Recipe | None
    quantized: dict[Op, str]


def matmuls_in(
    function: Callable[..., Any], dtypes: MatmulDtypes, weights: Sequence[str | None] = ()
) -> Callable[..., Any]:
    """Returns a pure function whose matmuls and convolutions of float32 operands cast them to a narrower dtype.

    Their results are cast back, so that all other operations, such as norms and softmax, keep their dtypes. A matmul
    with `precision="high"` or `"highest"` stays in float32, and so does the inside of a function with a custom
    derivative. The matmuls of weights that `weight_matmuls` lists are quantized. A compute dtype that is not one of
    `NARROWER` and no quantization return `function` unchanged.

    Args:
      function: takes and returns pytrees of arrays.
      dtypes: those of the matmuls.
      weights: for each leaf of its arguments, the path of a weight, or None; fewer for none of the others.

    Raises:
      TypeError: when called: a decomposition of a matrix, such as `jnp.linalg.slogdet`, has operands of the dtype.
      SpanaxError: when called: no matmul can be quantized.

    Example:
      >>> def loss(weight, x):
      ...     return jax.nn.softmax(x @ weight).var()
      >>> weight, x = jax.ShapeDtypeStruct((8, 4), "bfloat16"), jax.ShapeDtypeStruct((2, 8), "float32")
      >>> jaxpr = jax.make_jaxpr(matmuls_in(loss, MatmulDtypes("bfloat16")))(weight, x)
      >>> [eqn.outvars[0].aval.str_short() for eqn in jaxpr.eqns if eqn.primitive.name in ("dot_general", "exp")]
      ['bfloat16[2,4]', 'float32[2,4]']
    """
    dtype = dtypes.compute if dtypes.compute in NARROWER else None
    recipe = RECIPES[dtypes.quantize] if dtypes.quantize else None
    if dtype is None and recipe is None:
        return function

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        graph = from_jaxpr(closed, CALLS, as_traced=True)
        if dtype is not None:
            _check_decompositions(graph, dtype)
        quantized = {}
        if recipe is not None:
            paths = zip(graph.body.inputs, weights, strict=False)
            found = weight_matmuls(graph, {value: path for value, path in paths if path is not None}, recipe.tile)
            quantized = {op: path for op, path in found.items() if not _is_exact(op)}
            if not quantized:
                raise _nothing_quantized(dtypes.quantize)
        rewrite = _Rewrite(dtype, recipe, quantized)
        results = _evaluate(graph, rewrite, graph.body, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _nothing_quantized(name: str | None) -> VariantError:
    return VariantError(
        f"quantize '{name}' has no matmul to quantize.",
        where="it is for matmuls of a parameter, but the last, which computes the logits, routers and lookups",
        fix="omit --quantize",
    )


def _check_decompositions(graph: Graph, dtype: str) -> None:
    """Raises for what no platform compiles in a narrow dtype; JAX from 0.12 on raises as it traces."""

    def is_narrow(eqn: Any) -> bool:
        return eqn.primitive.name in WIDE and any(str(var.aval.dtype) == dtype for var in eqn.invars)

    for op in graph.ops():
        # The operations of bodies follow.
        if is_narrow(op.eqn) or (not op.bodies and contains(op.eqn, is_narrow)):
            raise TypeError(f"the decomposition of a matrix at {op.where} has no {dtype}")


def _evaluate(graph: Graph, rewrite: _Rewrite, body: Body, args: Sequence[Any]) -> Sequence[Any]:
    """Returns the outputs of a body, with its matmuls rewritten."""

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        if op.name in CONTRACTIONS:
            return _contracted(op, ins, rewrite)
        is_followed = op.name in ("scan", "while", "cond") or remat_of(op.eqn) is not None
        if is_followed and contains(op.eqn, lambda eqn: eqn.primitive.name in CONTRACTIONS):
            return with_bodies(op, ins, partial(_evaluate, graph, rewrite))
        return None

    return evaluate(graph.within(body), args, override)


def _contracted(op: Op, ins: Sequence[Any], rewrite: _Rewrite) -> Sequence[Any] | None:
    """Returns the results of a matmul that is quantized, or whose float32 operands are cast; None for any other."""
    floating = [array.dtype for array in ins if jnp.issubdtype(array.dtype, jnp.floating)]
    path = rewrite.quantized.get(op)
    if path is not None and rewrite.recipe is not None:
        return [_quantized(op, ins, rewrite.recipe, rewrite.dtype or jnp.result_type(*floating), path)]
    if rewrite.dtype is None or jnp.float32 not in floating or _is_exact(op):
        return None
    operands = [array.astype(rewrite.dtype) if array.dtype in floating else array for array in ins]
    outs = op.bind(operands, op.params | {"preferred_element_type": jnp.dtype(rewrite.dtype)})
    return [out.astype(jnp.float32) for out in outs]


def _is_exact(op: Op) -> bool:
    precision = op.params.get("precision")
    names = {getattr(each, "name", "") for each in (precision if isinstance(precision, tuple) else (precision,))}
    return not names.isdisjoint(EXACT)


def _quantized(op: Op, ins: Sequence[Any], recipe: Recipe, dtype: Any, path: str) -> Any:
    """Returns the result of a matmul of a weight, quantized and marked with its path.

    A remat policy that saves the results of matmuls saves the marked result, and not the sums in int32.
    """
    numbers = op.params["dimension_numbers"]
    lhs, rhs = (array.astype(dtype) for array in ins)
    has_batch = len(numbers[1][0]) > 0
    result = marked(quantized_matmul(lhs, rhs, numbers, recipe), (QUANTIZED if has_batch else PRODUCT) + path)
    return result.astype(op.eqn.outvars[0].aval.dtype)
