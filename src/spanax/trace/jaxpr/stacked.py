"""Values that loops compute, as further results of a program."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import jax

from spanax.trace.jaxpr.graph import Body, Graph, Op, remat_of


@dataclass(frozen=True)
class Stacked:
    """A value of all iterations.

    Attributes:
      value: its number among the results.
      inner: its number in an iteration.
      lengths: those of the loops around it, outermost first: its first dims.
    """

    value: int
    inner: int
    lengths: tuple[int, ...] = ()


def with_stacked(graph: Graph, values: Collection[int]) -> tuple[Graph, list[Stacked]]:
    """Returns the graph with values as further results; those in branches and `while` loops are not among them.

    Operations without bodies, and values, keep their identity.

    Example:
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> from spanax.trace.jaxpr.interpret import evaluate
      >>> loop = lambda x: jax.lax.scan(lambda total, each: (total + 2 * each, None), 0, x)
      >>> graph = from_jaxpr(jax.make_jaxpr(loop)(jax.numpy.arange(3)))
      >>> doubled = next(op.outputs[0] for op in graph.ops() if op.name == "mul")
      >>> graph, found = with_stacked(graph, [doubled])
      >>> found[0].lengths, graph.shape(found[0].value)
      ((3,), (3,))
    """
    avals = [*graph.avals]
    body, found = _handed_on(graph.body, frozenset(values), avals)
    body = replace(body, outputs=(*body.outputs, *(each.value for each in found)))
    return replace(graph, body=body, avals=avals), found


def _handed_on(body: Body, values: frozenset[int], avals: list[object]) -> tuple[Body, list[Stacked]]:
    """Returns a body whose loops and remats return the values they compute, and where these are in the body."""
    ops = list[Op]()
    found = list[Stacked]()
    for op in body.ops:
        found += [Stacked(value, value) for value in op.outputs if value in values]
        ops.append(op)
        if op.name != "scan" and remat_of(op.eqn) is None:
            continue
        inner, inside = _handed_on(op.bodies[0], values, avals)
        if not inside:
            continue
        length = (op.params["length"],) if op.name == "scan" else ()
        outside = [Stacked(len(avals) + index, each.inner, length + each.lengths) for index, each in enumerate(inside)]
        for each in inside:
            aval = avals[each.value]
            avals.append(jax.ShapeDtypeStruct((*length, *aval.shape), aval.dtype))  # type: ignore[attr-defined]
        inner = replace(inner, outputs=(*inner.outputs, *(each.value for each in inside)))
        ops[-1] = replace(op, outputs=(*op.outputs, *(each.value for each in outside)), bodies=(inner,))
        found += outside
    return replace(body, ops=tuple(ops)), found
