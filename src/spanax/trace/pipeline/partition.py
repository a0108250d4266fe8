"""Partitions a step's loop over microbatches into the stages of a pipeline.

Two loops over layers, forward and backward, divide the operations of a microbatch: those before the first loop
(front), between the loops (head), and after the second (end). A sum over microbatches is accumulated by the stage that
computes each term. Values that only the front computes and other stages need are sent along with the activations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto

from spanax.errors import PipelineError, SpanaxError
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op
from spanax.trace.jaxpr.loops import Loop, layer_loops, loop_of

ADDING = frozenset({"add", "add_any"})

IsReceived = Callable[[int], bool]
"""Returns whether a piece of the step receives a value, and need not compute it."""


class Needs(Flag):
    """What a value depends on in one microbatch; with NOTHING, it is the same for all microbatches."""

    NOTHING = 0
    MICROBATCH = auto()
    STATE = auto()
    FORWARD = auto()
    BACKWARD = auto()


@dataclass(frozen=True)
class Part:
    """One summand of a sum over microbatches: a value, and the dtype conversions before its addition."""

    value: int
    converts: tuple[Op, ...]


@dataclass(frozen=True)
class Sum:
    """A carried value that is only added to: its `parts`, by the piece that computes them."""

    index: int
    is_rows: bool
    parts: dict[str, tuple[Part, ...]]


@dataclass(frozen=True)
class State:
    """Any other carried value: its index in the carry, and its value before and after an iteration."""

    index: int
    before: int
    after: int


@dataclass(frozen=True, eq=False)
class PipelinePartition:
    """The pieces of a loop over microbatches. Numbers are values of its body; `ops` are in program order.

    Attributes:
      loop: the loop over microbatches.
      forward: the loop over layers in the forward pass, divided into stages.
      backward: the loop over layers in the backward pass.
      rows: operands stacked along the layers, equal for all microbatches: every stage has those of its layers.
      prepared_ops: operations computed before the loop, because they use the rows of all layers.
      prepared: their results that are not rows.
      ridden: values that the front sends to the other stages in addition to the layers' carry.
      collected: stacked results of the layers that the head reads.
      returned: values that the head sends back to the other stages in addition to the layers' carry.
      unchanged: carried values that no iteration changes, by index in the carry.
      layer_states: carried states that belong to layers.
      states: all other carried states, first those updated by the front.
      num_front_states: the number of states updated by the front.
      sums: the carried values that are only added to.
      results: the stacked results of the loop, each with the piece that computes it.
      front_ops, head_ops, end_ops: the operations of each piece.
      forward_ops, backward_ops: operations that every stage recomputes for its layers' operands.
    """

    loop: Loop
    forward: Loop
    backward: Loop
    rows: tuple[int, ...]
    prepared_ops: tuple[Op, ...]
    prepared: tuple[int, ...]
    ridden: tuple[int, ...]
    collected: tuple[int, ...]
    returned: tuple[int, ...]
    unchanged: Mapping[int, int]
    layer_states: tuple[State, ...]
    states: tuple[State, ...]
    num_front_states: int
    sums: tuple[Sum, ...]
    results: tuple[tuple[int, str], ...]
    front_ops: tuple[Op, ...]
    head_ops: tuple[Op, ...]
    end_ops: tuple[Op, ...]
    forward_ops: tuple[Op, ...]
    backward_ops: tuple[Op, ...]

    @property
    def payload_forward(self) -> tuple[int, ...]:
        """The values sent from stage to stage in the forward pass."""
        return (*self.forward.carried, *self.ridden, *self.collected)

    @property
    def payload_backward(self) -> tuple[int, ...]:
        """The values sent from stage to stage in the backward pass."""
        return (*self.backward.carried, *self.returned)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return int(self.forward.op.params["length"])


def pipeline_partition(traced: StepAnalysis, num_microbatches: int) -> PipelinePartition:
    """Returns the pipeline partition of a step's loop over microbatches.

    Raises:
      SpanaxError: the step has no such loop, no loop over layers inside it, or a dependency between microbatches or
        pieces that a pipeline cannot overlap.
    """
    graph = traced.graph
    candidates = [
        (loop, pair)
        for op in graph.body.ops
        if op.name == "scan" and op.params["length"] == num_microbatches
        for loop in (loop_of(graph, op),)
        for pair in layer_loops(graph, loop.body)
    ]
    if not candidates:
        raise _no_layers(traced, num_microbatches)
    loop, (forward, backward) = max(candidates, key=lambda candidate: _weight(graph, candidate[1][0]))
    return _Partitioner(traced, loop, forward, backward).partition()


def _weight(graph: Graph, loop: Loop) -> int:
    return sum(math.prod(graph.shape(value)) for value in loop.scanned)


def _no_layers(traced: StepAnalysis, num_microbatches: int) -> SpanaxError:
    if num_microbatches == 1:
        return PipelineError(
            "a pipeline needs microbatches, and the step has none.",
            fix="--microbatches 8, with a loss and no train_step",
        )
    return PipelineError(
        "the step has no loop over layers that could be divided into stages.",
        where=f"none inside of its loop over {num_microbatches} microbatches",
        fix="spanax.stack(model) for equal blocks in a list, or a mesh without 'pipe'",
    )


@dataclass(eq=False)
class _Partitioner:
    """Computes a `PipelinePartition`: what each value depends on, and what each piece receives."""

    traced: StepAnalysis
    loop: Loop
    forward: Loop
    backward: Loop
    needs: dict[int, Needs] = field(default_factory=dict)
    is_heavy: set[int] = field(default_factory=set)
    from_rows: set[int] = field(default_factory=set)
    states_needed: dict[int, frozenset[int]] = field(default_factory=dict)
    ridden: dict[int, None] = field(default_factory=dict)
    collected: dict[int, None] = field(default_factory=dict)
    returned: dict[int, None] = field(default_factory=dict)
    prepared: dict[int, None] = field(default_factory=dict)

    def partition(self) -> PipelinePartition:
        body = self.loop.body
        loop = self.loop
        carried = list(zip(body.inputs[loop.num_consts :], body.outputs[: loop.num_carried], strict=False))
        graph = self.traced.graph
        sums = {
            slot: parts for slot, pair in enumerate(carried) if (parts := _summands(*pair, graph, body)) is not None
        }
        self._trace(set(sums))
        self.rows = dict.fromkeys(v for v in (*self.forward.scanned, *self.backward.scanned) if self._is_row(v))
        unchanged = {slot: before for slot, (before, after) in enumerate(carried) if before == after}
        states = [State(slot, *pair) for slot, pair in enumerate(carried) if slot not in sums and slot not in unchanged]
        layer_states = [s for s in states if s.after in self.forward.stacked]
        self.layer_state_values = {state.before for state in layer_states}
        global_states = [state for state in states if state not in layer_states]
        front = [s for s in global_states if not self._of(s.after) & (Needs.FORWARD | Needs.BACKWARD)]
        head = [s for s in global_states if s not in front]
        for state in head:
            self._check_head_state(state)
        carried_sums = [self._sum(slot, parts) for slot, parts in sums.items()]
        results = [(value, self._place(value)) for value in body.outputs[loop.num_carried :]]
        pieces = self._pieces(carried_sums, front, head, results)
        prepared = [value for value in self.prepared if value not in self.rows]
        prepared_ops = self._slice([*self.rows, *prepared], lambda value: False)
        return PipelinePartition(
            loop,
            self.forward,
            self.backward,
            tuple(self.rows),
            prepared_ops,
            tuple(prepared),
            tuple(self.ridden),
            tuple(self.collected),
            tuple(self.returned),
            unchanged,
            tuple(layer_states),
            (*front, *head),
            len(front),
            tuple(carried_sums),
            tuple(results),
            **pieces,
        )

    def _pieces(
        self, sums: Sequence[Sum], front: Sequence[State], head: Sequence[State], results: Sequence[tuple[int, str]]
    ) -> dict[str, tuple[Op, ...]]:
        """Returns the operations of each piece, last to first: later pieces determine what earlier ones send."""

        def piece_outputs(place: str) -> list[int]:
            parts = [part.value for total in sums for part in total.parts.get(place, ())]
            return [*parts, *(value for value, result_place in results if result_place == place)]

        end_ops = self._slice(piece_outputs("end"), self._is_received_by_end)
        operands = [*self.backward.consts, *(v for v in self.backward.scanned if self._is_recomputed(v))]
        backward_ops = self._slice(operands, self._is_received_by_end)
        seeds = [*self.backward.carried, *self.returned, *(state.after for state in head)]
        head_ops = self._slice([*seeds, *piece_outputs("head")], self._is_received_by_head)
        operands = [*self.forward.consts, *(v for v in self.forward.scanned if self._is_recomputed(v))]
        forward_ops = self._slice(operands, self._is_sent_by_front)
        targets = [*self.forward.carried, *self.ridden, *(state.after for state in front), *piece_outputs("front")]
        front_ops = self._slice(targets, lambda value: self._prepares(value))
        return {
            "front_ops": front_ops,
            "head_ops": head_ops,
            "end_ops": end_ops,
            "forward_ops": forward_ops,
            "backward_ops": backward_ops,
        }

    def _trace(self, sums: set[int]) -> None:
        """Computes what every value of the body depends on."""
        loop = self.loop
        body = self.loop.body
        for index, value in enumerate(body.inputs):
            carried = index - loop.num_consts
            if carried < 0 or (carried < loop.num_carried and body.outputs[carried] == value):
                self.needs[value] = Needs.NOTHING
            elif carried < loop.num_carried:
                self.needs[value] = Needs.NOTHING if carried in sums else Needs.STATE
                self.states_needed[value] = frozenset([carried])
            else:
                self.needs[value] = Needs.MICROBATCH
        stacked = {*self.forward.scanned, *self.backward.scanned}
        for op in body.ops:
            needs = Needs.NOTHING
            for value in op.inputs:
                needs |= self._of(value)
            if op is self.forward.op:
                needs |= Needs.FORWARD
            if op is self.backward.op:
                needs |= Needs.BACKWARD
            is_heavy = op.name in CONTRACTIONS or bool(op.bodies) or any(value in self.is_heavy for value in op.inputs)
            has_rows = any(v in self.from_rows or (v in stacked and self._is_row(v)) for v in op.inputs)
            states = frozenset[int]().union(*(self.states_needed.get(value, frozenset()) for value in op.inputs))
            for value in op.outputs:
                self.needs[value] = needs
                self.states_needed[value] = states
                if is_heavy:
                    self.is_heavy.add(value)
                if has_rows and not needs:
                    self.from_rows.add(value)

    def _of(self, value: int) -> Needs:
        return self.needs.get(value, Needs.NOTHING)

    def _is_row(self, value: int) -> bool:
        is_known = value in self.traced.graph.constants
        return not is_known and not self._of(value)

    def _is_recomputed(self, value: int) -> bool:
        """Returns whether a stacked operand is computed for all layers at once, in every microbatch."""
        return not (value in self.rows or value in self.layer_state_values or value in self.forward.stacked)

    def _check_head_state(self, state: State) -> None:
        if self._of(state.after) & Needs.BACKWARD:
            reason = "depends on the gradients of a microbatch, and the next microbatch reads it"
        elif any(state.index in self.states_needed.get(value, ()) for value in self.forward.op.inputs):
            reason = "goes from the head of one microbatch to the front of the next"
        else:
            return
        raise PipelineError(
            f"carried value {state.index} of the step {reason}: no pipeline can overlap the two.",
            fix="a mesh without 'pipe'",
        )

    def _sum(self, index: int, parts: Sequence[Part]) -> Sum:
        by_place: dict[str, tuple[Part, ...]] = {}
        for part in parts:
            if part.value in self.backward.stacked:
                place = "layers"
            elif not self._of(part.value):
                place = "always"
                self.prepared[part.value] = None
            else:
                place = self._place(part.value)
            by_place[place] = (*by_place.get(place, ()), part)
        is_rows = "layers" in by_place
        if is_rows and set(by_place) - {"layers", "always"}:
            raise PipelineError(
                "a gradient comes partly from the layers and partly from outside of their loop.",
                where=f"carried value {index} of the loop over microbatches, from {', '.join(sorted(by_place))}",
                fix="a mesh without 'pipe'",
            )
        return Sum(index, is_rows, by_place)

    def _place(self, value: int) -> str:
        needs = self._of(value)
        if needs & Needs.BACKWARD:
            return "end"
        return "head" if needs & Needs.FORWARD else "front"

    def _slice(self, targets: Sequence[int], is_received: IsReceived) -> tuple[Op, ...]:
        """Returns the operations that compute the targets from the values that a piece receives."""
        loops = {*self.forward.op.outputs, *self.backward.op.outputs}
        return tuple(self.traced.graph.slice(targets, lambda value: is_received(value) or value in loops))

    def _prepares(self, value: int) -> bool:
        """Returns whether a value is computed before the loop, as are those that use the rows of all layers."""
        if value in self.from_rows and not self._of(value):
            self.prepared[value] = None
            return True
        return value in self.rows

    def _is_sent_by_front(self, value: int) -> bool:
        """Returns whether the front sends a value: it sends states and expensive values; others are recomputed."""
        if self._prepares(value):
            return True
        needs = self._of(value)
        if needs & (Needs.FORWARD | Needs.BACKWARD):
            return False
        is_state = needs & Needs.STATE and value not in self.traced.graph.producers
        if is_state or (needs and value in self.is_heavy):
            self.ridden[value] = None
            return True
        return False

    def _is_received_by_head(self, value: int) -> bool:
        if value in self.forward.stacked:
            self.collected[value] = None
            return True
        return self._is_sent_by_front(value)

    def _is_received_by_end(self, value: int) -> bool:
        if self._of(value) & Needs.FORWARD and not self._of(value) & Needs.BACKWARD:
            self.returned[value] = None
            return True
        return self._is_sent_by_front(value)


def _summands(before: int, after: int, graph: Graph, body: Body) -> list[Part] | None:
    """Returns the parts that are added to a carried value; None if it has any other use."""
    if before == after or len(graph.readers[before]) != 1 or before in body.outputs:
        return None
    parts: list[Part] = []
    stack: list[tuple[int, tuple[Op, ...]]] = [(after, ())]
    reaches_before = False
    while stack:
        value, converts = stack.pop()
        op = graph.producers.get(value)
        is_only = len(graph.readers[value]) + body.outputs.count(value) == 1
        if value == before:
            if converts or reaches_before:
                return None
            reaches_before = True
        elif op is not None and op.name in ADDING and is_only:
            stack.extend((operand, converts) for operand in reversed(op.inputs))
        elif op is not None and op.name == "convert_element_type" and is_only:
            stack.append((op.inputs[0], (op, *converts)))
        else:
            parts.append(Part(value, converts))
    return parts if reaches_before else None


ORDER_INVARIANT = frozenset({Family.ELEMENTWISE, Family.REDUCTION, Family.CONTRACTION, Family.VIEW})
"""Operations that treat all indices of a dim alike, whatever their order."""


def check_order_invariant(traced: StepAnalysis, partition: PipelinePartition) -> None:
    """Validates that no operation outside of the layer loop depends on the order of the layers.

    Raises:
      SpanaxError: an operation does.
    """
    labels = {traced.axes.classes[value][0] for value in partition.rows}
    for op in (*traced.graph.body.ops, *partition.prepared_ops):
        if op is partition.loop.op or not _has_label(traced, op, labels):
            continue
        constants = [
            v for v in op.inputs if v in traced.graph.constants and labels.intersection(traced.axes.classes[v])
        ]
        if op.family not in ORDER_INVARIANT or constants:
            raise PipelineError(
                f"`{op.name}` outside of the layer loop depends on the order of the layers.",
                where="schedule 'interleaved', whose stages have non-contiguous layers",
                fix="use schedule '1f1b' or 'zero-bubble'",
            )


def _has_label(traced: StepAnalysis, op: Op, labels: set[int | None]) -> bool:
    return any(labels.intersection(traced.axes.classes[value]) for value in (*op.inputs, *op.outputs))
