"""Stage: what one stage of a pipeline does at each tick."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spanax.plan.pipeline.schedules import KINDS
from spanax.plan.pipeline.stages import AXIS
from spanax.plan.pipeline.ticks import COLUMNS, Ticks, share_name
from spanax.run.step.pipeline.broadcast_from_stage import results, shared
from spanax.run.step.pipeline.residual_buffers import Residual, Storage
from spanax.run.step.replay.partial_sums import in_front, lifted
from spanax.run.step.replay.replay import Replay
from spanax.trace.jaxpr.loops import Loop
from spanax.trace.pipeline.partition import Part, PipelinePartition, State, Sum
from spanax.trace.pipeline.split_backward import SplitBackward

Values = dict[int, Any]

Mine = dict[str, Any]
"""A row of the table as one stage sees it, by column; `own` says whether the task at hand is this stage's."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline, as every device of it sees itself.

    Attributes:
      replay: how operations run inside of a stage.
      cut: the loop over microbatches in pieces.
      ticks: the table.
      meets: whether tasks of others are taken along, and forgotten.
      halves: a layer's way back in two, where the table takes it apart.
      rows: of each stacked value, the rows of this stage's layers.
      whole: what is the same for all microbatches, by value.
      microbatches: the batch, a leading dim for the microbatch.
      index: which stage this is.
    """

    replay: Replay
    cut: PipelinePartition
    ticks: Ticks
    meets: bool
    halves: SplitBackward | None
    rows: Values
    whole: Values = field(repr=False)
    microbatches: list[Any]
    index: Any

    @cached_property
    def storage(self) -> Storage:
        """What there is to hold from tick to tick."""
        return Storage(self.replay, self.cut, self.ticks, self.halves)

    def run(self, by_rows: Values, by_stage: Values, table: Any) -> tuple[Values, Values, list[Any]]:
        """All ticks: sums and states after them, and what is left of every microbatch."""
        sums, num_stages = {one.index for one in self.cut.sums}, self.ticks.num_stages
        first = self.index == 0
        started = {at: jnp.where(first, array, 0) if at in sums else array for at, array in by_stage.items()}
        begun = [{at: self._begun(at, array) for at, array in group.items()} for group in (by_rows, started)]
        held = self.storage.blank() | {"by_rows": begun[0], "by_stage": begun[1]}
        kinds = table[:, :, COLUMNS.index("kind")]
        taken = jnp.stack([(kinds == kind).any(1) for kind in range(len(KINDS))], 1)
        held, _ = lax.scan(self._tick, self.storage.placed(held), (table, taken))
        by_rows, by_stage = (
            {at: self._summed(at, array) for at, array in held[n].items()} for n in ("by_rows", "by_stage")
        )
        by_stage = shared(self.cut, by_stage, num_stages, self.index)
        return by_rows, by_stage, results(self.cut, held["results"], num_stages, self.index)

    def _begun(self, index: int, array: Any) -> Any:
        """A carried value as the ticks add to it: where its sum is put off, in parts."""
        return lifted(array, (), self.storage.deferred_axes(index), self.replay.mesh.shape)

    def _summed(self, index: int, array: Any) -> Any:
        return self.replay.reduced(
            array, self.replay.constraints[self.cut.loop.body.outputs[index]], self.storage.deferred_axes(index)
        )

    def _tick(self, held: Residual, row: tuple[Any, Any]) -> tuple[Residual, None]:
        table, taken = row
        placed, mine = self.storage.placed, dict(zip(COLUMNS, table[self.index], strict=True))
        tasks = (self._forward, self._backward, self._weights)[: 3 if self.halves else 2]
        num_own, num_ticks = self.ticks.num_microbatches * self.ticks.num_chunks, self.ticks.num_ticks
        for kind, task in enumerate(tasks):
            own = mine["kind"] == kind

            def do(held: Residual, task: Callable[..., Residual] = task, own: Any = own) -> Residual:
                return placed(task(held, mine | {"own": own}))

            with jax.named_scope(share_name(num_own, num_ticks)):
                held = lax.cond(taken[kind] if self.meets else own, do, placed, held)
        for kind, name, step in ((0, "forward", 1), (1, "backward", -1)):
            ring = [(at, (at + step) % self.ticks.num_stages) for at in range(self.ticks.num_stages)]

            def send(held: Residual, name: str = name, ring: list[tuple[int, int]] = ring) -> Residual:
                slot = mine[f"arrives_{name}"]
                got = [lax.ppermute(array, AXIS, ring) for array in held[f"sends_{name}"]]
                return placed(held | {name: _put_all(held[name], slot, got, slot >= 0)})

            with jax.named_scope(share_name(self.ticks.num_taken(KINDS[kind]), num_ticks)):
                held = lax.cond(taken[kind], send, placed, held)
        return held, None

    def _forward(self, held: Residual, mine: Mine) -> Residual:
        """One microbatch through one chunk's layers, the front before the first and the head behind the last."""
        cut, loop = self.cut, self.cut.forward
        part, micro = self._part(mine), self._micro(mine)
        states = {state.before: held["by_stage"][state.index] for state in cut.states}

        def front() -> tuple[Any, Any, Any]:
            values = self.whole | micro | states
            self.replay.ops(cut.front_ops, values)
            going = self.replay.read(values, [*loop.carried, *cut.ridden])
            by_stage = self._moved_on(held["by_stage"], values, "front", cut.states[: cut.num_front_states])
            blank = [self.storage.zeros(value) for value in cut.collected]
            return going + blank, by_stage, self._noted(held["results"], values, "front", mine)

        def later() -> tuple[Any, Any, Any]:
            return [_at(array, mine["received"]) for array in held["forward"]], held["by_stage"], held["results"]

        payload, by_stage, results = self._choose(part == 0, front, later)
        ridden = dict(zip(cut.ridden, payload[loop.num_carried :], strict=False))
        values = self.whole | micro | ridden
        self.replay.ops(cut.forward_ops, values)
        before = {state.before: self._chunk(held["by_rows"][state.index], mine) for state in cut.layer_states}
        carried, stacked = self._layers(loop, payload[: loop.num_carried], values, self._chunks(mine) | before, part)
        left = dict(zip(loop.stacked, stacked, strict=True))
        num_going = loop.num_carried + len(cut.ridden)
        collected = [
            self._collected(array, left[value], part)
            for array, value in zip(payload[num_going:], cut.collected, strict=True)
        ]
        by_rows = {
            state.index: self._put_chunk(held["by_rows"][state.index], mine, left[state.after])
            for state in cut.layer_states
        }
        kept = [(left | before)[value] for value in self.storage.residuals] + [*ridden.values()]
        held = held | {
            "by_rows": held["by_rows"] | by_rows,
            "kept": _put_all(held["kept"], mine["kept"], kept, self._wanted(mine)),
            "sends_forward": [*carried, *payload[loop.num_carried : num_going], *collected],
        }

        def head() -> tuple[Any, Any, Any]:
            values = self.whole | micro | states | ridden
            values |= dict(zip((*loop.results, *cut.collected), (*carried, *collected), strict=True))
            self.replay.ops(cut.head_ops, values)
            seeds = self.replay.read(values, cut.payload_backward)
            received = _put_all(held["backward"], mine["seeds"], seeds, self._wanted(mine))
            moved_on = self._moved_on(by_stage, values, "head", cut.states[cut.num_front_states :])
            return received, moved_on, self._noted(results, values, "head", mine)

        is_last = part == self.ticks.num_parts - 1
        received, by_stage, results = self._choose(is_last, head, lambda: (held["backward"], by_stage, results))
        return self._if_own(mine, held | {"backward": received}, by_stage, results)

    def _backward(self, held: Residual, mine: Mine) -> Residual:
        """The gradient of one microbatch back through one chunk's layers, and behind the first of them the end."""
        cut, loop = self.cut, self.cut.backward
        payload = [_at(array, mine["received"]) for array in held["backward"]]
        residuals, ridden = self._kept(held, mine)
        returned = dict(zip(cut.returned, payload[loop.num_carried :], strict=True))
        known = self.whole | self._micro(mine) | ridden | returned
        values = dict(known)
        self.replay.ops(cut.backward_ops, values)
        part, chunks = self._part(mine), self._chunks(mine) | residuals
        carried, stacked = self._layers(loop, payload[: loop.num_carried], values, chunks, part, self.halves)
        held = held | {"sends_backward": [*carried, *returned.values()]}
        if self.halves is None:
            held = held | {"by_rows": self._added(held["by_rows"], mine, stacked)}
        else:
            left = [*stacked, *returned.values()]
            held = held | {"split": _put_all(held["split"], mine["split"], left, self._wanted(mine))}

        def end() -> tuple[Any, Any]:
            values = known | dict(zip(loop.results, carried, strict=True))
            self.replay.ops(cut.end_ops, values)
            by_stage = self._moved_on(held["by_stage"], values, "end", ())
            return by_stage, self._noted(held["results"], values, "end", mine)

        by_stage, results = self._choose(part == 0, end, lambda: (held["by_stage"], held["results"]))
        return self._if_own(mine, held, by_stage, results)

    def _weights(self, held: Residual, mine: Mine) -> Residual:
        """The gradients of one chunk's weights, of one microbatch."""
        assert self.halves is not None, "only a table that takes the way back apart has such tasks"
        loop, two = self.cut.backward, self.halves
        split = [_at(array, mine["split"]) for array in held["split"]]
        between, returned = (
            split[: len(two.between)],
            dict(zip(self.cut.returned, split[len(two.between) :], strict=True)),
        )
        residuals, ridden = self._kept(held, mine)
        values = self.whole | self._micro(mine) | ridden | returned
        self.replay.ops(self.cut.backward_ops, values)
        scanned = self._operands(loop, values, self._chunks(mine) | residuals, self._part(mine))
        consts = self.replay.read(values, loop.consts)

        names, wanted = (*loop.body_consts, *loop.body_scanned, *two.between), two.outputs[loop.num_carried :]

        def layer(_: None, each: tuple[list[Any], list[Any], Any]) -> tuple[None, list[Any]]:
            def run() -> tuple[list[Any], list[Any]]:
                inside = dict(zip(names, [*consts, *each[0], *each[1]], strict=True))
                self.replay.ops(two.second, inside)
                return [], self.replay.read(inside, wanted)

            return None, self._unless_padding(each[2], run, [], wanted)[1]

        _, stacked = lax.scan(layer, None, (scanned, between, self._is_layer(self._part(mine))))
        return held | {"by_rows": self._added(held["by_rows"], mine, stacked)}

    def _layers(
        self,
        loop: Loop,
        carried: Sequence[Any],
        values: Values,
        chunks: Values,
        part: Any,
        two: SplitBackward | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """The layers of one chunk in their order: what goes on, and what they leave (in halves: for the second)."""
        consts, scanned = self.replay.read(values, loop.consts), self._operands(loop, values, chunks, part)

        def layer(carried: list[Any], each: tuple[list[Any], Any]) -> tuple[list[Any], list[Any]]:
            def run() -> tuple[list[Any], list[Any]]:
                args = [*consts, *carried, *each[0]]
                if two is None:
                    outs = self.replay.body(loop.body, args)
                    return outs[: loop.num_carried], outs[loop.num_carried :]
                inside = dict(zip(loop.body.inputs, args, strict=True))
                self.replay.ops(two.first, inside)
                going = self.replay.read(inside, two.outputs[: loop.num_carried])
                return going, self.replay.read(inside, two.between)

            outputs = loop.body.outputs if two is None else (*loop.body.outputs[: loop.num_carried], *two.between)
            return self._unless_padding(each[1], run, carried, outputs)

        xs = scanned, self._is_layer(part)
        return lax.scan(layer, list(carried), xs, reverse=loop.op.params["reverse"], length=self.storage.num_rows)

    def _is_layer(self, part: Any) -> Any:
        """For each row of a chunk whether it has a layer; None where all have one."""
        parts = self.storage.parts
        if not parts.num_short:
            return None
        return (jnp.arange(parts.num_rows) < parts.num_rows - 1) | parts.is_full(part)

    def _unless_padding(
        self,
        is_layer: Any,
        run: Callable[[], tuple[list[Any], list[Any]]],
        carried: Sequence[Any],
        outputs: Sequence[int],
    ) -> tuple[list[Any], list[Any]]:
        """What a layer gives; a row of padding hands on what it was given, and leaves zeros."""
        if is_layer is None:
            return run()

        def place(going: Sequence[Any], left: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            constraints, late = self.replay.constraints, self.replay.unreduced.of
            arrays = zip([*going, *left], outputs, strict=True)
            placed = [self.replay.constrained(array, constraints[value], late(value)) for array, value in arrays]
            return placed[: len(going)], placed[len(going) :]

        left = jax.eval_shape(run)[1]
        zeros = lambda: place(carried, [jnp.zeros(each.shape, each.dtype) for each in left])  # noqa: E731
        return self._choose(is_layer, lambda: place(*run()), zeros)

    def _collected(self, array: Any, left: Any, part: Any) -> Any:
        """What layers leave for the head, with that of one chunk; the next chunk's comes over its padding."""
        short = self.storage.parts.num_short
        longer = _one_longer(array) if short else array
        found = lax.dynamic_update_slice_in_dim(longer, left, self.storage.parts.first_layer(part), 0)
        return found[: len(array)] if short else found

    def _operands(self, loop: Loop, values: Values, chunks: Values, part: Any) -> list[Any]:
        """The stacked operands of a loop over layers, as far as they belong to one chunk."""
        found, parts = [], self.storage.parts
        for value in loop.scanned:
            if value in chunks:
                found.append(chunks[value])
            else:
                (array,) = self.replay.read(values, [value])
                array = _one_longer(array) if parts.num_short else array
                found.append(lax.dynamic_slice_in_dim(array, parts.first_layer(part), parts.num_rows, 0))
        return found

    def _part(self, mine: Mine) -> Any:
        """Which part of the model a chunk is."""
        return mine["chunk"] * self.ticks.num_stages + self.index

    def _micro(self, mine: Mine) -> Values:
        """One microbatch, by value."""
        pairs = zip(self.cut.loop.body_scanned, self.microbatches, strict=True)
        return {value: _at(array, mine["microbatch"]) for value, array in pairs}

    def _kept(self, held: Residual, mine: Mine) -> tuple[Values, Values]:
        """What was kept of a microbatch: of the layers, and of what rode along."""
        kept, residuals = [_at(array, mine["kept"]) for array in held["kept"]], self.storage.residuals
        return dict(zip(residuals, kept, strict=False)), dict(zip(self.cut.ridden, kept[len(residuals) :], strict=True))

    def _chunks(self, mine: Mine) -> Values:
        """One chunk's rows of all that is stacked and the same for all microbatches."""
        return {value: self._chunk(array, mine) for value, array in self.rows.items()}

    def _chunk(self, array: Any, mine: Mine, dim: int = 0) -> Any:
        if self.ticks.num_chunks == 1:
            return array
        return lax.dynamic_slice_in_dim(array, mine["chunk"] * self.storage.num_rows, self.storage.num_rows, dim)

    def _put_chunk(self, array: Any, mine: Mine, new: Any, dim: int = 0) -> Any:
        new = jnp.where(mine["own"], new, self._chunk(array, mine, dim)) if self.meets else new
        return lax.dynamic_update_slice_in_dim(array, new, mine["chunk"] * self.storage.num_rows, dim)

    def _part_of(self, one: Sum, part: Part, array: Any) -> Any:
        """A summand as it goes into its sum."""
        axes = self.storage.deferred_axes(one.index)
        return lifted(converted(part, array), self.replay.unreduced.of(part.value), axes, self.replay.mesh.shape)

    def _added(self, by_rows: Values, mine: Mine, stacked: Sequence[Any]) -> Values:
        """The sums of gradients with those of one chunk and microbatch."""
        left, found = dict(zip(self.cut.backward.stacked, stacked, strict=True)), dict(by_rows)
        for one in self.cut.sums:
            for part in one.parts.get("layers", ()):
                dim, axes = len(self.storage.deferred_axes(one.index)), self.replay.unreduced.of(part.value)
                added = self._part_of(one, part, in_front(left[part.value], axes))
                total = self._chunk(found[one.index], mine, dim) + added
                found[one.index] = self._put_chunk(found[one.index], mine, total, dim)
        return found

    def _moved_on(self, by_stage: Values, values: Values, place: str, states: Sequence[State]) -> Values:
        """Sums with the parts of one piece, and states as that piece leaves them."""
        found = dict(by_stage)
        for one in self.cut.sums:
            for part in one.parts.get(place, ()):
                (array,) = self.replay.read(values, [part.value])
                found[one.index] = found[one.index] + self._part_of(one, part, array)
        for state in states:
            (found[state.index],) = self.replay.read(values, [state.after])
        return found

    def _noted(self, results: Sequence[Any], values: Values, place: str, mine: Mine) -> list[Any]:
        """What is left of every microbatch, with what one piece knows of this one."""
        found = list(results)
        for at, (value, where) in enumerate(self.cut.results):
            if where == place:
                (array,) = self.replay.read(values, [value])
                found[at] = lax.dynamic_update_index_in_dim(found[at], array, mine["microbatch"], 0)
        return found

    def _choose(self, wanted: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        if not self.meets:
            return lax.cond(wanted, yes, no)
        return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), yes(), no())

    def _wanted(self, mine: Mine) -> Any:
        return mine["own"] if self.meets else True

    def _if_own(self, mine: Mine, held: Residual, by_stage: Values, results: list[Any]) -> Residual:
        """What is held, with new sums, states and results if the task was this stage's own."""
        if self.meets:
            old = held["by_stage"], held["results"]
            by_stage, results = jax.tree.map(lambda a, b: jnp.where(mine["own"], a, b), (by_stage, results), old)
        return held | {"by_stage": by_stage, "results": results}


def converted(part: Part, array: Any) -> Any:
    """A summand as it goes into its sum."""
    for op in part.converts:
        (array,) = op.bind([array])
    return array


def _one_longer(array: Any) -> Any:
    return jnp.concatenate([array, array[-1:]])


def _at(array: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(array, jnp.maximum(index, 0), 0, keepdims=False)


def _put_all(slots: Sequence[Any], slot: Any, arrays: Sequence[Any], wanted: Any) -> list[Any]:
    """Arrays, each in one of its slots; left as they were where they are not wanted."""
    at = jnp.maximum(slot, 0)

    def put(old: Any, new: Any) -> Any:
        new = new if wanted is True else jnp.where(wanted, new, _at(old, at))
        return lax.dynamic_update_index_in_dim(old, new, at, 0)

    return [put(old, new) for old, new in zip(slots, arrays, strict=True)]
