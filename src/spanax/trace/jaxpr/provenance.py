"""Which inputs each value of a graph depends on, and which values depend on each input."""

from collections.abc import Mapping, Sequence
from enum import IntEnum

from spanax.trace.jaxpr.graph import Body, Graph


class Origin(IntEnum):
    """What a value was computed from; several at once are their sum."""

    NONE = 0
    BATCH = 1
    PARAM = 2
    OPTIMIZER = 4


def origins(graph: Graph, inputs: Mapping[int, Origin]) -> list[int]:
    """The origins of every value, by its number, given those of the inputs.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda w, x: (w * 2, w * x))(1.0, 2.0))
      >>> w, x = graph.body.inputs
      >>> found = origins(graph, {w: Origin.PARAM, x: Origin.BATCH})
      >>> [found[value] == Origin.PARAM for value in graph.body.outputs]
      [True, False]
    """
    found = [0] * len(graph.avals)
    for value, origin in inputs.items():
        found[value] = int(origin)
    _follow(graph, graph.body, found)
    return found


def _follow(graph: Graph, body: Body, found: list[int]) -> None:
    for op in body.ops:
        if not op.bodies:
            combined = 0
            for value in op.inputs:
                combined |= found[value]
            for value in op.outputs:
                found[value] |= combined
            continue
        wires = graph.wires(op)
        for outer, inner in wires.inputs:
            found[inner] |= found[outer]
        # A loop's carry may depend on more after each round; it settles once a round adds nothing.
        while True:
            for inner_body in op.bodies:
                _follow(graph, inner_body, found)
            behind = [(first, last) for first, last in wires.carried if found[last] & ~found[first]]
            if not behind:
                break
            for first, last in behind:
                found[first] |= found[last]
        for outer, inner in wires.outputs:
            found[outer] |= found[inner]


def feeds(graph: Graph, targets: Sequence[bool]) -> list[bool]:
    """Whether each value goes into the computation of a target, by its number; a target does not feed itself.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda w, x: (w * 2, w * x))(1.0, 2.0))
      >>> found = feeds(graph, [value == graph.body.outputs[1] for value in range(len(graph.avals))])
      >>> [found[value] for value in (*graph.body.inputs, *graph.body.outputs)]
      [True, True, False, False]
    """
    found = [False] * len(graph.avals)
    _trace_back(graph, graph.body, targets, found)
    return found


def _trace_back(graph: Graph, body: Body, targets: Sequence[bool], found: list[bool]) -> None:
    for op in reversed(body.ops):
        if not op.bodies:
            if any(found[value] or targets[value] for value in op.outputs):
                for value in op.inputs:
                    found[value] = True
            continue
        wires = graph.wires(op)
        for outer, inner in wires.outputs:
            found[inner] |= found[outer] or targets[outer]
        while True:
            for inner_body in op.bodies:
                _trace_back(graph, inner_body, targets, found)
            behind = [(first, last) for first, last in wires.carried if found[first] and not found[last]]
            if not behind:
                break
            for _, last in behind:
                found[last] = True
        for outer, inner in wires.inputs:
            found[outer] |= found[inner] or targets[inner]
