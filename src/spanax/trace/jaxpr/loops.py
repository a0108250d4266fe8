"""Classifies operands and results of scans, and finds the loops over layers in the forward and backward pass."""

from collections.abc import Iterator
from dataclasses import dataclass

from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op, scan_counts


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


def layer_loops(graph: Graph, body: Body) -> Iterator[tuple[Loop, Loop]]:
    """Yields pairs of loops over layers: the backward one scans stacked values of the forward one, in reverse."""
    loops = [loop_of(graph, op) for op in body.ops if op.name == "scan" and _contracts(op)]
    for forward in loops:
        for backward in loops:
            same_length = forward.op.params["length"] == backward.op.params["length"]
            is_reversed = forward.op.params["reverse"] != backward.op.params["reverse"]
            if same_length and is_reversed and set(backward.scanned) & {*forward.stacked, *forward.scanned}:
                if _reaches(body, forward.op, backward.op):
                    yield forward, backward


def _contracts(op: Op) -> bool:
    return any(inner.name in CONTRACTIONS or _contracts(inner) for body in op.bodies for inner in body.ops)


def _reaches(body: Body, first: Op, second: Op) -> bool:
    reached = set(first.outputs)
    for op in body.ops:
        if reached.intersection(op.inputs):
            if op is second:
                return True
            reached.update(op.outputs)
    return False
