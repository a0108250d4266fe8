"""Which inputs each value of a graph depends on, and which values contribute to given targets."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import reduce
from operator import or_
from typing import TypeVar

from spanax.trace.jaxpr.graph import Body, Graph, Op

T = TypeVar("T", bound=Hashable)


class Origin(IntEnum):
    """The groups of inputs that a value depends on; several are combined by bitwise or."""

    NONE = 0
    BATCH = 1
    PARAM = 2
    OPTIMIZER = 4


def origins(graph: Graph, inputs: Mapping[int, Origin]) -> list[int]:
    """Returns the origins of every value, by its number, given those of the inputs.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda w, x: (w * 2, w * x))(1.0, 2.0))
      >>> w, x = graph.body.inputs
      >>> result = origins(graph, {w: Origin.PARAM, x: Origin.BATCH})
      >>> [result[value] == Origin.PARAM for value in graph.body.outputs]
      [True, False]
    """
    return propagated(graph, inputs, lambda op, operands: reduce(or_, operands, 0))


def propagated(graph: Graph, seeds: Mapping[int, int], transfer: Callable[[Op, list[int]], int]) -> list[int]:
    """Returns the bits of every value, by its number, propagated from operands to results through loops and branches.

    Args:
      graph: the program.
      seeds: the bits of inputs and constants; 0 for missing values.
      transfer: the bits of an operation's results, given those of its operands, of which it is a monotonic function.
    """
    result = [0] * len(graph.avals)
    for value, bits in seeds.items():
        result[value] = int(bits)
    _follow(graph, graph.body, result, transfer)
    return result


def _follow(graph: Graph, body: Body, result: list[int], transfer: Callable[[Op, list[int]], int]) -> None:
    for op in body.ops:
        if not op.bodies:
            bits = transfer(op, [result[value] for value in op.inputs])
            for value in op.outputs:
                result[value] |= bits
            continue
        wires = graph.wires(op)
        for outer, inner in wires.inputs:
            result[inner] |= result[outer]
        # Iterate to a fixed point: a carry may depend on more after each iteration.
        while True:
            for inner_body in op.bodies:
                _follow(graph, inner_body, result, transfer)
            pending = [(first, last) for first, last in wires.carried if result[last] & ~result[first]]
            if not pending:
                break
            for first, last in pending:
                result[first] |= result[last]
        for outer, inner in wires.outputs:
            result[outer] |= result[inner]


def feeds(graph: Graph, targets: Sequence[bool]) -> list[bool]:
    """Returns whether each value contributes to a target, by its number; a target does not contribute to itself.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda w, x: (w * 2, w * x))(1.0, 2.0))
      >>> result = feeds(graph, [value == graph.body.outputs[1] for value in range(len(graph.avals))])
      >>> [result[value] for value in (*graph.body.inputs, *graph.body.outputs)]
      [True, True, False, False]
    """
    result = [False] * len(graph.avals)
    _trace_back(graph, graph.body, targets, result)
    return result


def _trace_back(graph: Graph, body: Body, targets: Sequence[bool], result: list[bool]) -> None:
    for op in reversed(body.ops):
        if not op.bodies:
            if any(result[value] or targets[value] for value in op.outputs):
                for value in op.inputs:
                    result[value] = True
            continue
        wires = graph.wires(op)
        for outer, inner in wires.outputs:
            result[inner] |= result[outer] or targets[outer]
        while True:
            for inner_body in op.bodies:
                _trace_back(graph, inner_body, targets, result)
            pending = [(first, last) for first, last in wires.carried if result[first] and not result[last]]
            if not pending:
                break
            for _, last in pending:
                result[last] = True
        for outer, inner in wires.inputs:
            result[outer] |= result[inner] or targets[inner]


def reachable(start: T, neighbors: Mapping[T, Iterable[T]]) -> frozenset[T]:
    """Returns what a chain of neighbors leads to from a start, itself included.

    Example:
      >>> sorted(reachable(1, {1: [2], 2: [1, 3], 4: [5]}))
      [1, 2, 3]
    """
    found = {start}
    stack = [start]
    while stack:
        new = [each for each in neighbors.get(stack.pop(), ()) if each not in found]
        found.update(new)
        stack += new
    return frozenset(found)
