"""Evaluation of a graph on arrays or tracers, where selected operations may be computed otherwise."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import core, source_info_util

from spanax.trace.jaxpr.graph import BODIES, REMAT, Body, Graph, Op, opened, remat_of, scan_counts

Values = dict[int, Any]
"""Arrays or tracers, by value number."""

Override = Callable[[Op, Sequence[Any]], Sequence[Any] | None]
"""Computes the results of an operation from its operands; None leaves it to the operation's primitive."""

Function = Callable[..., Sequence[Any]]


def evaluate(
    graph: Graph,
    args: Sequence[Any],
    override: Override | None = None,
    ops: Iterable[Op] | None = None,
) -> list[Any]:
    """Returns the outputs of a graph.

    Args:
      graph: the program.
      args: its inputs.
      override: computes selected operations; runs those whose bodies it changes by `with_bodies`.
      ops: the operations to evaluate, by default all of them.

    Example:
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: 2.0 * x + 1.0)(0.0))
      >>> evaluate(graph, [3.0], lambda op, ins: [ins[0] - ins[1]] if op.name == "add" else None)
      [Array(5., dtype=float32, weak_type=True)]
    """
    values = dict(zip(graph.body.inputs, args, strict=True))
    run(graph, graph.body.ops if ops is None else ops, values, override)
    return read(graph, values, graph.body.outputs)


def run(graph: Graph, ops: Iterable[Op], values: Values, override: Override | None = None) -> None:
    """Evaluates operations in order; reads operands from `values` and adds the results to it."""
    for op in ops:
        ins = read(graph, values, op.inputs)
        with as_traced(op):
            outs = None if override is None else override(op, ins)
            outs = op.bind(ins) if outs is None else outs
        values.update(zip(op.outputs, outs, strict=True))


def read(graph: Graph, values: Mapping[int, Any], numbers: Iterable[int]) -> list[Any]:
    """Returns values by number: computed ones, literals and constants."""
    return [values[number] if number in values else graph.constants[number] for number in numbers]


def as_traced(op: Op) -> AbstractContextManager[None]:
    """Returns a context in which operations are traced with the source line and the name stack of `op`."""
    source_info = op.eqn.source_info
    name_stack = source_info_util.current_name_stack() + source_info.name_stack
    return source_info_util.user_context(source_info.traceback, name_stack=name_stack)


def with_bodies(
    op: Op,
    ins: Sequence[Any],
    function: Callable[[Body, Sequence[Any]], Sequence[Any]],
    shape: Callable[[int], Sequence[int]] | None = None,
) -> Sequence[Any]:
    """Runs a loop, a branch or a remat, with its parameters, on other bodies.

    Args:
      op: the operation.
      ins: its operands.
      function: computes the outputs of a body from its inputs; it must not close over tracers.
      shape: the shape of each input of a body, if it differs from the traced one.
    """
    functions = [lambda *args, body=body: function(body, args) for body in op.bodies]
    remat = remat_of(op.eqn)
    if remat is not None and not remat["differentiated"]:
        return rematted(remat, functions[0])(*ins)
    pairs = iter(zip(op.bodies, functions, strict=True))

    def replaced(old: Any) -> Any:
        body, function = next(pairs)
        return retraced(old, function, None if shape is None else [shape(value) for value in body.inputs])

    params = dict(op.params)
    for key in ("jaxpr",) if op.name in REMAT else BODIES[op.name]:
        old = params[key]
        params[key] = tuple(map(replaced, old)) if isinstance(old, tuple) else replaced(old)
    return op.bind(ins, params)


def rematted(remat: Mapping[str, Any], function: Function) -> Function:
    """Returns a function under `jax.checkpoint`, with the policy of a remat as `remat_of` returns it."""
    checkpointed: Function = jax.checkpoint(function, policy=remat["policy"], prevent_cse=remat["prevent_cse"])
    return checkpointed


def rebuilt(graph: Graph, op: Op, ins: Sequence[Any], functions: Sequence[Function]) -> list[Any]:
    """Runs a loop, a branch or a remat with each body replaced by a function, which may close over tracers."""
    params = op.params
    if (remat := remat_of(op.eqn)) is not None:
        return list(rematted(remat, functions[0])(*ins))
    if op.name == "cond":
        return list(jax.lax.switch(ins[0], functions, *ins[1:]))
    if op.name == "while":
        num_test = params["cond_nconsts"]
        num_consts = params["cond_nconsts"] + params["body_nconsts"]
        test, body = functions
        stops = lambda carry: test(*ins[:num_test], *carry)[0]  # noqa: E731
        return list(jax.lax.while_loop(stops, lambda carry: body(*ins[num_test:num_consts], *carry), ins[num_consts:]))
    num_consts, num_carried = scan_counts(graph, op)

    def scan_body(carry: list[Any], row: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        outs = functions[0](*ins[:num_consts], *carry, *row)
        return outs[:num_carried], outs[num_carried:]

    carry = ins[num_consts : num_consts + num_carried]
    rows = ins[num_consts + num_carried :]
    loop = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(scan_body, carry, rows, **loop)
    return [*carry, *stacked]


def retraced(old: Any, function: Function, shapes: Sequence[Sequence[int]] | None = None) -> Any:
    """Returns a function traced as the body of an operation, closed or open like the old body.

    `shapes` has the shape of every operand, if any differs.
    """
    jaxpr, _ = opened(old)
    # Keep memory spaces (residuals offloaded to the host), and drop shardings, which may name another mesh.
    avals = [var.aval.update(sharding=None, weak_type=False) for var in jaxpr.invars]
    pairs = zip(avals, shapes or (), strict=shapes is not None)
    avals = [a if a.shape == shape else a.update(shape=tuple(shape)) for a, shape in pairs] if shapes else avals
    closed = jax.make_jaxpr(function)(*avals)
    if isinstance(old, core.ClosedJaxpr) and old is not jaxpr:
        return closed
    if closed.consts:  # an open jaxpr cannot hold constants, but a call inside it can
        closed = jax.make_jaxpr(jax.jit(core.jaxpr_as_fun(closed)))(*avals)
    return closed.jaxpr
