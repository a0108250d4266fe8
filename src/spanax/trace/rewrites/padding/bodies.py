"""Loops, branches and remats whose bodies compute with padded dims."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.trace.jaxpr.dim_maps.relations import Shape
from spanax.trace.jaxpr.graph import Body, Graph, Op, scan_counts
from spanax.trace.jaxpr.interpret import with_bodies
from spanax.trace.rewrites.padding.dims import fitted

Evaluate = Callable[[Body, Sequence[Any]], list[Any]]
"""Returns the outputs of a body, given its inputs; dims of either may be padded."""


def with_padded_bodies(graph: Graph, op: Op, ins: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """Runs a loop, a branch or a remat on padded operands; results are padded where its bodies return them so.

    A carry is padded where its value before or after an iteration is, and a result of branches where any has it so.
    """
    ins, inner = _operands(graph, op, ins)
    outs = [_out_shapes(graph, body, shapes, evaluate) for body, shapes in zip(op.bodies, inner, strict=True)]
    if op.name == "cond":
        outs = [functools.reduce(_longest, outs)] * len(outs)
    elif op.name in ("scan", "while"):
        first, count = _carry(graph, op)
        carry = _longest(inner[-1][first : first + count], outs[-1])
        while carry != inner[-1][first : first + count]:
            inner[-1][first : first + count] = carry
            outs[-1] = _out_shapes(graph, op.bodies[-1], inner[-1], evaluate)
            carry = _longest(carry, outs[-1])
        outs[-1][:count] = carry
        outer = len(ins) - count if op.name == "while" else first
        ins = [*ins[:outer], *_all_fitted(ins[outer : outer + count], carry), *ins[outer + count :]]
        if op.name == "while":
            inner[0][len(inner[0]) - count :] = carry
    targets = dict(zip(op.bodies, outs, strict=True))
    pairs = [
        pair for body, shapes in zip(op.bodies, inner, strict=True) for pair in zip(body.inputs, shapes, strict=True)
    ]
    run = lambda body, args: _all_fitted(evaluate(body, args), targets[body])  # noqa: E731
    return [*with_bodies(op, ins, run, dict(pairs).__getitem__)]


def _operands(graph: Graph, op: Op, ins: Sequence[Any]) -> tuple[list[Any], list[list[Shape]]]:
    """Returns the operands, not padded along the iterations of a loop, and the shapes of the inputs of each body."""
    if op.name == "scan":
        first = sum(scan_counts(graph, op))
        scanned = [
            fitted(array, (graph.shape(value)[0], *np.shape(array)[1:]))[0]
            for value, array in zip(op.inputs[first:], ins[first:], strict=True)
        ]
        return [*ins[:first], *scanned], [[*map(np.shape, ins[:first]), *(np.shape(array)[1:] for array in scanned)]]
    shapes = [*map(np.shape, ins)]
    if op.name == "while":
        num_test = op.params["cond_nconsts"]
        num_body = op.params["body_nconsts"]
        return [*ins], [[*shapes[:num_test], *shapes[num_test + num_body :]], shapes[num_test:]]
    return [*ins], [shapes[op.name == "cond" :] for _ in op.bodies]


def _carry(graph: Graph, op: Op) -> tuple[int, int]:
    """Returns the first carried input of the body of a loop, and their number."""
    if op.name == "scan":
        return scan_counts(graph, op)
    return op.params["body_nconsts"], len(op.outputs)


def _out_shapes(graph: Graph, body: Body, shapes: Sequence[Shape], evaluate: Evaluate) -> list[Shape]:
    avals = [jax.ShapeDtypeStruct(shape, graph.avals[v].dtype) for v, shape in zip(body.inputs, shapes, strict=True)]
    return [tuple(out.shape) for out in jax.eval_shape(lambda *args: [*map(jnp.asarray, evaluate(body, args))], *avals)]


def _longest(first: Iterable[Shape], second: Iterable[Shape]) -> list[Shape]:
    """Returns the larger size of each dim."""
    return [tuple(map(max, *pair)) for pair in zip(first, second, strict=False)]


def _all_fitted(arrays: Iterable[Any], shapes: Iterable[Shape]) -> list[Any]:
    return [fitted(array, shape)[0] for array, shape in zip(arrays, shapes, strict=True)]
