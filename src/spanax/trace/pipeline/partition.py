"""Partitions a step's loop over microbatches into the stages of a pipeline.

Two loops over layers, forward and backward, divide the operations of a microbatch: those before the first loop
(front), between the loops (head), and after the second (end). A sum over microbatches is accumulated by the stage that
computes each term. Values that only the front computes and other stages need are sent along with the activations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto

from spanax.errors import SpanaxError
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op
from spanax.trace.jaxpr.loops import Loop, layer_loops, loop_of
from spanax.trace.traced import Traced

ADDING = frozenset({"add", "add_any"})

Handed = Callable[[int], bool]
"""Whether a piece of the step is given a value, and need not compute it."""


class Needs(Flag):
    """What of one microbatch a value was computed from; nothing of it: the same for all microbatches."""

    NOTHING = 0
    MICROBATCH = auto()
    STATE = auto()
    FORWARD = auto()
    BACKWARD = auto()


@dataclass(frozen=True)
class Part:
    """One summand of a sum over microbatches: a value, and what it is converted by on its way into the sum."""

    value: int
    converts: tuple[Op, ...]


@dataclass(frozen=True)
class Sum:
    """Something carried from microbatch to microbatch that is only added to: `parts` by where they are computed."""

    index: int
    is_rows: bool
    parts: dict[str, tuple[Part, ...]]


@dataclass(frozen=True)
class State:
    """Something else that is carried: its place among the carried values, and its value before and after."""

    index: int
    before: int
    after: int


@dataclass(frozen=True, eq=False)
class PipelinePartition:
    """A loop over microbatches in pieces. Numbers are values of its body; `ops` are in the order of the program.

    Attributes:
      loop: the loop over microbatches.
      forward: the loop over layers that is to be divided, on the way to the loss.
      backward: the one on the way back.
      rows: stacked along the layers and the same for all microbatches: every stage has those of its layers.
      prepared_ops: what is computed before the loop, because it works on all layers' rows.
      prepared: of its results, those that are no rows.
      ridden: what the front hands on to the other stages beside the layers' carry.
      collected: stacked results of the layers that the head reads.
      returned: what the head hands back to the other stages beside the layers' carry.
      unchanged: carried values that stay what they are, by their place among the carried.
      layer_states: carried states that belong to layers.
      states: all other carried states, those that the front moves on first.
      num_front_states: how many those are.
      sums: what is only added to.
      results: what is left of every microbatch, each with where it is computed.
      front_ops, head_ops, end_ops: the operations of each piece.
      forward_ops, backward_ops: what every stage computes anew for its layers' operands.
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
        """What goes from stage to stage on the way to the loss."""
        return (*self.forward.carried, *self.ridden, *self.collected)

    @property
    def payload_backward(self) -> tuple[int, ...]:
        """What goes from stage to stage on the way back."""
        return (*self.backward.carried, *self.returned)

    @property
    def num_layers(self) -> int:
        """How many layers there are to divide."""
        return int(self.forward.op.params["length"])


def pipeline_partition(traced: Traced, num_microbatches: int) -> PipelinePartition:
    """Take the loop over microbatches of a step apart.

    Raises:
      SpanaxError: the step has no such loop, no layers that could be divided, or something that goes through all stages
        and back to the first.
    """
    graph = traced.graph
    found = [
        (loop, pair)
        for op in graph.body.ops
        if op.name == "scan" and op.params["length"] == num_microbatches
        for loop in (loop_of(graph, op),)
        for pair in layer_loops(graph, loop.body)
    ]
    if not found:
        raise _no_layers(traced, num_microbatches)
    loop, (forward, backward) = max(found, key=lambda one: _weight(graph, one[1][0]))
    return _Cutter(traced, loop, forward, backward).cut()


def _weight(graph: Graph, loop: Loop) -> int:
    def size(value: int) -> int:
        count = 1
        for dim in graph.shape(value):
            count *= dim
        return count

    return sum(map(size, loop.scanned))


def _no_layers(traced: Traced, num_microbatches: int) -> SpanaxError:
    if num_microbatches == 1:
        return SpanaxError(
            "a pipeline needs microbatches, and the step has none.",
            fix="--microbatches 8, with a loss and no train_step",
        )
    return SpanaxError(
        "the step has no loop over layers that could be divided into stages.",
        where=f"none inside of its loop over {num_microbatches} microbatches",
        fix="spanax.stack(model) for equal blocks in a list, or a mesh without 'pipe'",
    )


@dataclass(eq=False)
class _Cutter:
    """The work of `pipeline_partition`: what each value needs, and what each piece must be handed."""

    traced: Traced
    loop: Loop
    forward: Loop
    backward: Loop
    needs: dict[int, Needs] = field(default_factory=dict)
    is_heavy: set[int] = field(default_factory=set)
    from_rows: set[int] = field(default_factory=set)
    producers: dict[int, Op] = field(default_factory=dict)
    states_needed: dict[int, frozenset[int]] = field(default_factory=dict)
    ridden: dict[int, None] = field(default_factory=dict)
    collected: dict[int, None] = field(default_factory=dict)
    returned: dict[int, None] = field(default_factory=dict)
    prepared: dict[int, None] = field(default_factory=dict)

    def cut(self) -> PipelinePartition:
        body, loop = self.loop.body, self.loop
        carried = list(zip(body.inputs[loop.num_consts :], body.outputs[: loop.num_carried], strict=False))
        readers = _readers(body)
        sums = {at: parts for at, pair in enumerate(carried) if (parts := _summands(*pair, readers, body)) is not None}
        self._trace(set(sums))
        self.rows = dict.fromkeys(v for v in (*self.forward.scanned, *self.backward.scanned) if self._is_row(v))
        unchanged = {at: before for at, (before, after) in enumerate(carried) if before == after}
        states = [State(at, *pair) for at, pair in enumerate(carried) if at not in sums and at not in unchanged]
        layer_states = [s for s in states if s.after in self.forward.stacked]
        self.layer_state_values = {state.before for state in layer_states}
        others = [state for state in states if state not in layer_states]
        front = [s for s in others if not self._of(s.after) & (Needs.FORWARD | Needs.BACKWARD)]
        head = [s for s in others if s not in front]
        for state in head:
            self._check_head_state(state)
        found = [self._sum(at, parts) for at, parts in sums.items()]
        results = [(value, self._place(value)) for value in body.outputs[loop.num_carried :]]
        pieces = self._pieces(found, front, head, results)
        prepared = [value for value in self.prepared if value not in self.rows]
        prepared_ops = self._slice([*self.rows, *prepared], lambda value: False)
        return PipelinePartition(
            self.loop, self.forward, self.backward, tuple(self.rows), prepared_ops, tuple(prepared),
            tuple(self.ridden), tuple(self.collected), tuple(self.returned),
            unchanged, tuple(layer_states), (*front, *head), len(front), tuple(found), tuple(results), **pieces,
        )  # fmt: skip

    def _pieces(
        self, sums: Sequence[Sum], front: Sequence[State], head: Sequence[State], results: Sequence[tuple[int, str]]
    ) -> dict[str, tuple[Op, ...]]:
        """The operations of each piece: from the last to the first, for the later ones say what they must be handed."""

        def wanted(place: str) -> list[int]:
            parts = [part.value for one in sums for part in one.parts.get(place, ())]
            return [*parts, *(value for value, where in results if where == place)]

        end_ops = self._slice(wanted("end"), self._handed_at_end)
        operands = [*self.backward.consts, *(v for v in self.backward.scanned if self._is_whole(v))]
        backward_ops = self._slice(operands, self._handed_at_end)
        seeds = [*self.backward.carried, *self.returned, *(state.after for state in head)]
        head_ops = self._slice([*seeds, *wanted("head")], self._handed_to_head)
        operands = [*self.forward.consts, *(v for v in self.forward.scanned if self._is_whole(v))]
        forward_ops = self._slice(operands, self._handed_on)
        wanted_first = [*self.forward.carried, *self.ridden, *(state.after for state in front), *wanted("front")]
        front_ops = self._slice(wanted_first, lambda value: self._prepares(value))
        return {
            "front_ops": front_ops,
            "head_ops": head_ops,
            "end_ops": end_ops,
            "forward_ops": forward_ops,
            "backward_ops": backward_ops,
        }

    def _trace(self, sums: set[int]) -> None:
        """What every value of the body needs."""
        loop, body = self.loop, self.loop.body
        for at, value in enumerate(body.inputs):
            carried = at - loop.num_consts
            if carried < 0 or (carried < loop.num_carried and body.outputs[carried] == value):
                self.needs[value] = Needs.NOTHING
            elif carried < loop.num_carried:
                self.needs[value] = Needs.NOTHING if carried in sums else Needs.STATE
                self.states_needed[value] = frozenset([carried])
            else:
                self.needs[value] = Needs.MICROBATCH
        stacked = {*self.forward.scanned, *self.backward.scanned}
        for op in body.ops:
            found = Needs.NOTHING
            for value in op.inputs:
                found |= self._of(value)
            if op is self.forward.op:
                found |= Needs.FORWARD
            if op is self.backward.op:
                found |= Needs.BACKWARD
            is_heavy = op.name in CONTRACTIONS or bool(op.bodies) or any(value in self.is_heavy for value in op.inputs)
            has_rows = any(v in self.from_rows or (v in stacked and self._is_row(v)) for v in op.inputs)
            states = frozenset[int]().union(*(self.states_needed.get(value, frozenset()) for value in op.inputs))
            for value in op.outputs:
                self.needs[value], self.producers[value], self.states_needed[value] = found, op, states
                if is_heavy:
                    self.is_heavy.add(value)
                if has_rows and not found:
                    self.from_rows.add(value)

    def _of(self, value: int) -> Needs:
        return self.needs.get(value, Needs.NOTHING)

    def _is_row(self, value: int) -> bool:
        is_known = value in self.traced.graph.constants
        return not is_known and not self._of(value)

    def _is_whole(self, value: int) -> bool:
        """Whether a stacked operand is computed for all layers at once, for every microbatch anew."""
        return not (value in self.rows or value in self.layer_state_values or value in self.forward.stacked)

    def _check_head_state(self, state: State) -> None:
        if self._of(state.after) & Needs.BACKWARD:
            told = "depends on the gradients of a microbatch, and the next one takes it"
        elif any(state.index in self.states_needed.get(value, ()) for value in self.forward.op.inputs):
            told = "goes from the head of one microbatch to the front of the next"
        else:
            return
        raise SpanaxError(
            f"what the step carries as value {state.index} {told}: no pipeline can overlap the two.",
            fix="a mesh without 'pipe'",
        )

    def _sum(self, at: int, parts: Sequence[Part]) -> Sum:
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
            raise SpanaxError(
                "a gradient comes partly from the layers and partly from outside of their loop.",
                where=f"carried value {at} of the loop over microbatches, from {', '.join(sorted(by_place))}",
                fix="a mesh without 'pipe'",
            )
        return Sum(at, is_rows, by_place)

    def _place(self, value: int) -> str:
        found = self._of(value)
        return "end" if found & Needs.BACKWARD else "head" if found & Needs.FORWARD else "front"

    def _slice(self, wanted: Sequence[int], is_handed: Handed) -> tuple[Op, ...]:
        """The operations that lead to some values, up to what a piece is handed."""
        found: set[Op] = set()
        stack = list(wanted)
        seen = set[int]()
        while stack:
            value = stack.pop()
            if value in seen or is_handed(value):
                continue
            seen.add(value)
            op = self.producers.get(value)
            if op is None or op in (self.forward.op, self.backward.op):
                continue
            found.add(op)
            stack.extend(op.inputs)
        return tuple(op for op in self.loop.body.ops if op in found)

    def _prepares(self, value: int) -> bool:
        """What works on all layers' rows at once is computed before the loop."""
        if value in self.from_rows and not self._of(value):
            self.prepared[value] = None
            return True
        return value in self.rows

    def _handed_on(self, value: int) -> bool:
        """Of what the front knows: states, and what is dear, ride along; the rest is computed anew."""
        if self._prepares(value):
            return True
        found = self._of(value)
        if found & (Needs.FORWARD | Needs.BACKWARD):
            return False
        is_state = found & Needs.STATE and value not in self.producers
        if is_state or (found and value in self.is_heavy):
            self.ridden[value] = None
            return True
        return False

    def _handed_to_head(self, value: int) -> bool:
        if value in self.forward.stacked:
            self.collected[value] = None
            return True
        return self._handed_on(value)

    def _handed_at_end(self, value: int) -> bool:
        if self._of(value) & Needs.FORWARD and not self._of(value) & Needs.BACKWARD:
            self.returned[value] = None
            return True
        return self._handed_on(value)


def _readers(body: Body) -> dict[int, list[Op]]:
    readers: dict[int, list[Op]] = {}
    for op in body.ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    return readers


def _summands(before: int, after: int, readers: dict[int, list[Op]], body: Body) -> list[Part] | None:
    """The parts that are added to a carried value; None where something else happens to it."""
    producers = {value: op for op in body.ops for value in op.outputs}
    if before == after or len(readers.get(before, ())) != 1 or before in body.outputs:
        return None
    parts: list[Part] = []
    stack: list[tuple[int, tuple[Op, ...]]] = [(after, ())]
    found_before = False
    while stack:
        value, converts = stack.pop()
        op = producers.get(value)
        is_only = len(readers.get(value, ())) + body.outputs.count(value) == 1
        if value == before:
            if converts or found_before:
                return None
            found_before = True
        elif op is not None and op.name in ADDING and is_only:
            stack.extend((each, converts) for each in reversed(op.inputs))
        elif op is not None and op.name == "convert_element_type" and is_only:
            stack.append((op.inputs[0], (op, *converts)))
        else:
            parts.append(Part(value, converts))
    return parts if found_before else None
