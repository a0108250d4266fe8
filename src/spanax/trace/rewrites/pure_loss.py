"""Converts a user's `loss(model, batch)` into a pure function of arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spanax.errors import LossError
from spanax.trace.jaxpr.graph import REMAT, Body, Graph, from_jaxpr, scan_counts
from spanax.trace.rewrites.matmul_dtype import MatmulDtypes, matmuls_in
from spanax.trace.variables import changed_variables

NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def pure_loss(
    loss: Callable[..., Any], dtypes: MatmulDtypes, model: nnx.Module, optimizer: nnx.Optimizer
) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a loss as a pure function, and its first two arguments: trained parameters and other state.

    Its third argument is the batch; it returns `(loss, (metrics, other state, moved))`; see `_moved`.
    """
    return pure_function(lambda model, batch: with_extra(loss(model, batch)), dtypes, model, optimizer.wrt)


def pure_function(
    function: Callable[..., tuple[Any, Any]], dtypes: MatmulDtypes, node: Any, wrt: Any
) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a function of an NNX object and a batch as `pure_loss` does; it returns `(scalar, other results)`.

    Args:
      function: the function.
      dtypes: those to which floating parameters and batch, and the operands of matmuls, are cast.
      node: the object, or a pytree of objects.
      wrt: the NNX filter of the parameters.
    """
    graphdef, params, rest = nnx.split(node, wrt, ...)

    def forward(params: Any, rest: Any, batch: Any) -> tuple[Any, Any, tuple[Any, Any]]:
        part = nnx.merge(graphdef, params, rest, copy=True)
        returned = function(part, batch)
        nnx.pop(part, nnx.Intermediate)
        return *nnx.state(part, wrt, ...), returned

    def value(params: Any, rest: Any, batch: Any) -> tuple[Any, tuple[Any, Any, list[Any]]]:
        args = _cast(params, dtypes.compute), rest, _cast(batch, dtypes.compute)
        after, rest_after, (scalar, extra) = forward(*args)
        moved = _moved(forward, after, args, params)
        return scalar.astype(jnp.promote_types(scalar.dtype, jnp.float32)), (extra, _like(rest_after, rest), moved)

    return matmuls_in(value, dtypes, _weights(params, rest)), params, rest


def _weights(params: Any, rest: Any) -> list[str | None]:
    """Returns the path of each trained or frozen parameter, and None for each other leaf of the state."""
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    paths = list[str | None]()
    for state, is_trained in ((params, True), (rest, False)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)[0]:
            is_weight = is_trained or isinstance(leaf, nnx.Param)
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            paths += [name if is_weight else None] * len(jax.tree.leaves(leaf))
    return paths


def with_extra(returned: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the result of a loss, with or without metrics, as `(scalar, dict)`."""
    scalar, extra = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if getattr(scalar, "shape", None) != ():
        raise LossError(
            f"`loss` returned {type(scalar).__name__} of shape {getattr(scalar, 'shape', None)}, not a scalar.",
            fix="return loss.mean(), or (loss.mean(), {'name': metric})",
        )
    if not jnp.issubdtype(scalar.dtype, jnp.floating):
        raise LossError(
            f"`loss` returned {scalar.dtype}[]; only a floating loss has a gradient.",
            fix="a differentiable loss; report counts and accuracies as metrics: return loss, {'correct': count}",
        )
    if not isinstance(extra, Mapping):
        raise LossError(
            f"`loss` returned {type(extra).__name__} next to its value, not a dict of metrics.",
            fix="return loss, {'name': metric}",
        )
    return scalar, numbers_of("loss", extra)


def numbers_of(function: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics unchanged if all are numbers and arrays, and raises otherwise."""
    is_module = lambda node: isinstance(node, nnx.Module)  # noqa: E731
    for path, value in jax.tree_util.tree_flatten_with_path(dict(metrics), is_leaf=is_module)[0]:
        if not isinstance(value, NUMBERS):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise LossError(
                f"`{function}` returned a {type(value).__name__} as its metric '{name}'.",
                fix="a dict of numbers and arrays; a step changes model and optimizer where they are",
            )
    return dict(metrics)


def _cast(tree: Any, dtype: Any) -> Any:
    if dtype is None:
        return tree
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, tree)


def _moved(forward: Callable[..., Any], after: Any, args: tuple[Any, ...], params: Any) -> list[Any]:
    """Returns, for each parameter, the value that a loss overwrites it with (as `nnx.WeightNorm` does), or None."""
    num_before, num_after = (len(jax.tree.leaves(tree)) for tree in (params, after))
    if num_before != num_after:
        raise LossError(
            f"the loss changed how many parameters there are: {num_before} arrays before, {num_after} after.",
            fix="create every variable in the model's __init__",
        )
    groups = list(zip(*map(jax.tree.leaves, (after, args[0], params)), strict=True))
    is_written = [new is not old for new, old, _ in groups]
    if any(is_written):
        is_written = param_writes(lambda *args: jax.tree.leaves(forward(*args)[0]), *args)
    return [
        new.astype(param.dtype) if writes else None for writes, (new, _, param) in zip(is_written, groups, strict=True)
    ]


def _like(state: Any, before: Any) -> Any:
    """Casts state to the dtypes of `before`: a running mean must not drift into the compute dtype.

    Raises:
      SpanaxError: the variables differ from `before`.
    """
    if odd := sorted(_paths(state) ^ _paths(before)):
        raise changed_variables("`loss`", odd)
    leaves, structure = jax.tree.flatten(state)
    pairs = zip(leaves, jax.tree.leaves(before), strict=True)
    return jax.tree.unflatten(
        structure, [new.astype(old.dtype) if new.dtype != old.dtype else new for new, old in pairs]
    )


def _paths(state: Any) -> set[str]:
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat}


def check_unmoved(params: Any, moved: list[Any], count: int) -> None:
    """Checks that a loss does not write to trained parameters, which must be equal in every microbatch.

    Raises:
      SpanaxError: it writes to a parameter.
    """
    for (path, _), new in zip(jax.tree_util.tree_leaves_with_path(params), moved, strict=True):
        if new is not None:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise LossError(
                f"the loss writes to the parameter `{name}`; {count} microbatches would each write to it.",
                fix="microbatches=1, or parameters that only the optimizer writes to",
            )


PASSING = frozenset({"copy", "copy_p", "optimization_barrier", "sharding_constraint", "name"})
"""Operations whose results are their operands."""


def param_writes(after: Callable[..., Sequence[Any]], before: Any, *others: Any) -> list[bool]:
    """Returns, for each leaf of `before`, whether `after(before, *others)` replaces it with another value.

    Example:
      >>> import jax.numpy as jnp
      >>> def after(leaves):
      ...     stacked = jax.lax.scan(lambda carry, row: (carry, row), 0.0, leaves[1])[1]
      ...     return [leaves[0] * 2, stacked]
      >>> param_writes(after, [jnp.ones(3), jnp.ones((2, 3))])
      [True, False]
    """
    graph = from_jaxpr(jax.make_jaxpr(after)(before, *others))
    return [_source(graph, graph.body, value) != index for index, value in enumerate(graph.body.outputs)]


def _source(graph: Graph, body: Body, value: int) -> int | None:
    """Returns the index of the body input that a value is passed through from, or None if it is computed."""
    while value not in body.inputs:
        op = graph.producers.get(value)
        if op is None:
            return None
        index = op.outputs.index(value)
        if op.name in PASSING:
            value = op.inputs[index]
            continue
        if op.name not in REMAT | {"scan"}:
            return None
        inner = _source(graph, op.bodies[0], op.bodies[0].outputs[index])
        if inner is None or (op.name == "scan" and not _stays(graph, op, index, inner)):
            return None
        value = op.inputs[inner]
    return body.inputs.index(value)


def _stays(graph: Graph, op: Any, index: int, inner: int) -> bool:
    """Returns whether a scan's result is its operand: an unchanged carry, or a scanned operand stacked again."""
    num_consts, num_carried = scan_counts(graph, op)
    return inner == num_consts + index if index < num_carried else inner >= num_consts + num_carried
