"""Splits a layer's backward pass into input gradients and weight gradients.

The previous stage waits for the input gradients. The weight gradients can be computed at any later time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spanax.trace.jaxpr.graph import REMAT, Body, Op
from spanax.trace.jaxpr.loops import Loop


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """One layer's way back in two.

    Attributes:
      first: the operations that lead to the gradient of the layer's input.
      second: those that are left, for the gradients of its weights.
      between: what the second half reads of the first, and of the gradient that the first began with.
      outputs: the values of the body's results, in their order.
      as_written: for every operation here, the one of the program that it stands for.
    """

    first: tuple[Op, ...]
    second: tuple[Op, ...]
    between: tuple[int, ...]
    outputs: tuple[int, ...]
    as_written: Mapping[Op, Op]


def split_backward(loop: Loop) -> SplitBackward:
    """Divide the body of a loop over layers that runs back; what is under a remat is divided too."""
    body, num_carried = loop.body, loop.num_carried
    as_written: dict[Op, Op] = {}
    same: dict[int, int] = {}
    ops = _inlined(body, same, as_written)
    outputs = tuple(_first(same, value) for value in body.outputs)
    first = _leading_to(ops, outputs[:num_carried])
    second = _leading_to(ops, outputs[num_carried:]) - first
    carried = body.inputs[loop.num_consts : loop.num_consts + num_carried]
    made = {*carried, *(value for op in first for value in op.outputs)}
    read = [*(value for op in ops if op in second for value in op.inputs), *outputs[num_carried:]]
    between = dict.fromkeys(value for value in read if value in made)
    return SplitBackward(
        tuple(op for op in ops if op in first),
        tuple(op for op in ops if op in second),
        tuple(between),
        outputs,
        as_written,
    )


def _inlined(body: Body, same: dict[int, int], as_written: dict[Op, Op]) -> list[Op]:
    """The operations of a body and of all remats in it; `same` says which values are others under a second number."""
    found: list[Op] = []
    for op in body.ops:
        if op.name in REMAT:
            (inner,) = op.bodies
            same.update(zip(inner.inputs, op.inputs, strict=True))
            found += _inlined(inner, same, as_written)
            same.update(zip(op.outputs, inner.outputs, strict=True))
        else:
            found.append(replace(op, inputs=tuple(_first(same, value) for value in op.inputs)))
            as_written[found[-1]] = op
    return found


def _first(same: Mapping[int, int], value: int) -> int:
    while value in same:
        value = same[value]
    return value


def _leading_to(ops: Sequence[Op], wanted: Sequence[int]) -> set[Op]:
    producers = {value: op for op in ops for value in op.outputs}
    found: set[Op] = set()
    stack = list(wanted)
    while stack:
        op = producers.get(stack.pop())
        if op is not None and op not in found:
            found.add(op)
            stack.extend(op.inputs)
    return found
