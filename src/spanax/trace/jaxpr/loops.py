"""Classifies scans by their operands and results, and finds the loops over layers, forward and backward."""

from collections.abc import Iterator
from dataclasses import dataclass

from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op, scan_counts


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan over layers or microbatches: its operands and results by what they are."""

    op: Op
    num_consts: int
    num_carried: int

    @property
    def body(self) -> Body:
        """One turn."""
        return self.op.bodies[0]

    @property
    def body_consts(self) -> tuple[int, ...]:
        """Inside of one turn, what every turn takes alike."""
        return self.body.inputs[: self.num_consts]

    @property
    def body_carried(self) -> tuple[int, ...]:
        """Inside of one turn, what the one before it hands on."""
        return self.body.inputs[self.num_consts : self.num_consts + self.num_carried]

    @property
    def body_scanned(self) -> tuple[int, ...]:
        """Inside of one turn, its own of what is stacked."""
        return self.body.inputs[self.num_consts + self.num_carried :]

    @property
    def consts(self) -> tuple[int, ...]:
        """What every turn takes alike."""
        return self.op.inputs[: self.num_consts]

    @property
    def carried(self) -> tuple[int, ...]:
        """What the first turn takes from outside."""
        return self.op.inputs[self.num_consts : self.num_consts + self.num_carried]

    @property
    def scanned(self) -> tuple[int, ...]:
        """What is stacked: each turn takes its own."""
        return self.op.inputs[self.num_consts + self.num_carried :]

    @property
    def results(self) -> tuple[int, ...]:
        """What the last turn hands on."""
        return self.op.outputs[: self.num_carried]

    @property
    def stacked(self) -> tuple[int, ...]:
        """What every turn leaves, stacked."""
        return self.op.outputs[self.num_carried :]


def loop_of(graph: Graph, op: Op) -> Loop:
    """A scan with its operands by what they are."""
    num_consts, num_carried = scan_counts(graph, op)
    return Loop(op, num_consts, num_carried)


def layer_loops(graph: Graph, body: Body) -> Iterator[tuple[Loop, Loop]]:
    """Loops over layers, forward and back: the second runs the other way, over what the first one left."""
    loops = [loop_of(graph, op) for op in body.ops if op.name == "scan" and _contracts(op)]
    for forward in loops:
        for backward in loops:
            same = forward.op.params["length"] == backward.op.params["length"]
            turned = forward.op.params["reverse"] != backward.op.params["reverse"]
            if same and turned and set(backward.scanned) & {*forward.stacked, *forward.scanned}:
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
