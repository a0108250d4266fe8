"""Classifies operands and results of scans, and finds the loops over layers in the forward and backward pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from spanax.trace.jaxpr.graph import CONTRACTIONS, REMAT, Body, Graph, Op, scan_counts

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan over layers or microbatches, with its operands and results by role."""

    op: Op
    num_consts: int
    num_carried: int

    @property
    def body(self) -> Body:
        """The body of one iteration."""
        return self.op.bodies[0]

    @property
    def body_consts(self) -> tuple[int, ...]:
        """The consts, as values of the body."""
        return self.body.inputs[: self.num_consts]

    @property
    def body_carried(self) -> tuple[int, ...]:
        """The carry of an iteration, as values of the body."""
        return self.body.inputs[self.num_consts : self.num_consts + self.num_carried]

    @property
    def body_scanned(self) -> tuple[int, ...]:
        """The slices of the stacked operands, as values of the body."""
        return self.body.inputs[self.num_consts + self.num_carried :]

    @property
    def consts(self) -> tuple[int, ...]:
        """The operands that every iteration reads unchanged."""
        return self.op.inputs[: self.num_consts]

    @property
    def carried(self) -> tuple[int, ...]:
        """The initial carry."""
        return self.op.inputs[self.num_consts : self.num_consts + self.num_carried]

    @property
    def scanned(self) -> tuple[int, ...]:
        """The stacked operands; each iteration reads one slice."""
        return self.op.inputs[self.num_consts + self.num_carried :]

    def by_role(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Returns operands in the order of the loop's, such as arrays, as consts, initial carry and stacked ones."""
        first = self.num_consts + self.num_carried
        return list(operands[: self.num_consts]), list(operands[self.num_consts : first]), list(operands[first:])

    @property
    def results(self) -> tuple[int, ...]:
        """The final carry."""
        return self.op.outputs[: self.num_carried]

    @property
    def stacked(self) -> tuple[int, ...]:
        """The stacked results, one slice per iteration."""
        return self.op.outputs[self.num_carried :]


def loop_of(graph: Graph, op: Op) -> Loop:
    """Returns a scan with its operands and results classified."""
    num_consts, num_carried = scan_counts(graph, op)
    return Loop(op, num_consts, num_carried)


LOOPS = frozenset({"scan", "while"})
"""The operations that run a body several times."""


def const_pairs(graph: Graph, op: Op) -> list[tuple[int, int]]:
    """Returns the operands of a loop that all iterations read unchanged, outside and inside of it: its first ones."""
    if op.name == "scan":
        inside = loop_of(graph, op).body_consts
    else:
        test, body = op.bodies
        inside = (*test.inputs[: op.params["cond_nconsts"]], *body.inputs[: op.params["body_nconsts"]])
    return [*zip(op.inputs, inside, strict=False)]


def layer_loops(graph: Graph, body: Body) -> Iterator[tuple[Loop, Loop]]:
    """Yields pairs of loops over layers: the backward one scans stacked values of the forward one, in reverse."""
    loops = [loop_of(graph, op) for op in body.ops if op.name == "scan" and _contracts(op)]
    for forward in loops:
        for backward in loops:
            same_length = forward.op.params["length"] == backward.op.params["length"]
            is_reversed = forward.op.params["reverse"] != backward.op.params["reverse"]
            if same_length and is_reversed and set(backward.scanned) & {*forward.stacked, *forward.scanned}:
                if forward.op in graph.slice(backward.op.inputs):
                    yield forward, backward


def _contracts(op: Op) -> bool:
    return any(inner.name in CONTRACTIONS or _contracts(inner) for body in op.bodies for inner in body.ops)


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
    first_values = {*loop.body_carried, *(value for op in first for value in op.outputs)}
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
