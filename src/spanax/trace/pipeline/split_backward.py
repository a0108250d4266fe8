"""Splits a layer's backward pass into input gradients and weight gradients.

The previous stage waits for the input gradients. The weight gradients can be computed at any later time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spanax.trace.jaxpr.graph import REMAT, Body, Graph, Op
from spanax.trace.jaxpr.loops import Loop


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """The backward pass of one layer as two lists of operations.

    Attributes:
      first: operations that compute the gradient of the layer's input.
      second: the remaining operations, which compute the gradients of its weights.
      between: values that `second` reads from `first`, or from the incoming gradient.
      outputs: the values of the body's results, in order.
      as_written: for each of these operations, the original operation of the program.
    """

    first: tuple[Op, ...]
    second: tuple[Op, ...]
    between: tuple[int, ...]
    outputs: tuple[int, ...]
    as_written: Mapping[Op, Op]


def split_backward(loop: Loop) -> SplitBackward:
    """Splits the body of a backward loop over layers; remats are inlined and split too."""
    body = loop.body
    num_carried = loop.num_carried
    as_written: dict[Op, Op] = {}
    aliases: dict[int, int] = {}
    ops = _inlined(body, aliases, as_written)
    outputs = tuple(_first(aliases, value) for value in body.outputs)
    graph = Graph(Body(body.inputs, outputs, tuple(ops)), (), {})
    first = graph.slice(outputs[:num_carried])
    second = graph.slice(outputs[num_carried:], {value for op in first for value in op.outputs})
    carried = body.inputs[loop.num_consts : loop.num_consts + num_carried]
    first_values = {*carried, *(value for op in first for value in op.outputs)}
    operands = [*(value for op in second for value in op.inputs), *outputs[num_carried:]]
    between = dict.fromkeys(value for value in operands if value in first_values)
    return SplitBackward(tuple(first), tuple(second), tuple(between), outputs, as_written)


def _inlined(body: Body, aliases: dict[int, int], as_written: dict[Op, Op]) -> list[Op]:
    """Returns the operations of a body with remats inlined; `aliases` maps second numbers of values to first ones."""
    ops: list[Op] = []
    for op in body.ops:
        if op.name in REMAT:
            (inner,) = op.bodies
            aliases.update(zip(inner.inputs, op.inputs, strict=True))
            ops += _inlined(inner, aliases, as_written)
            aliases.update(zip(op.outputs, inner.outputs, strict=True))
        else:
            ops.append(replace(op, inputs=tuple(_first(aliases, value) for value in op.inputs)))
            as_written[ops[-1]] = op
    return ops


def _first(aliases: Mapping[int, int], value: int) -> int:
    while value in aliases:
        value = aliases[value]
    return value
