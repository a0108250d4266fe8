"""Runs one stage of a pipeline: the tasks of its ticks, and the transfers between stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spanax.plan.pipeline.schedules import KINDS
from spanax.plan.pipeline.stages import AXIS
from spanax.plan.pipeline.ticks import COLUMNS, Ticks, share_name
from spanax.step.pipeline.broadcast_from_stage import broadcast_carries, broadcast_results
from spanax.step.pipeline.residual_buffers import Buffers, BufferSpec, read_slot, write_slots
from spanax.step.replay.partial_sums import add_partial_sum_dims, leading_before_stacked
from spanax.step.replay.replay import Replay
from spanax.trace.jaxpr.loops import Loop, SplitBackward
from spanax.trace.pipeline.partition import Part, PipelinePartition, State, Sum

Values = dict[int, Any]

Layer = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""Maps the carry and the operands of one layer to the next carry and the stacked results."""

Task = dict[str, Any]
"""The row of the tick table for this stage, by column; `active` is whether the current task belongs to this stage."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline, as each of its devices runs it.

    Attributes:
      replay: the replay inside of a stage.
      partition: the partition of the loop over microbatches.
      ticks: the tick table.
      lockstep: run each task of a tick on all stages, and discard its results on stages that do not have it.
      split: the split backward pass of a layer, if the schedule has separate weight gradients.
      rows: for each stacked operand, the rows of this stage's layers.
      invariants: values that are equal for all microbatches.
      microbatches: the batch, with a leading dim of microbatches.
      index: index of this stage.
    """

    replay: Replay
    partition: PipelinePartition
    ticks: Ticks
    lockstep: bool
    split: SplitBackward | None
    rows: Values
    invariants: Values = field(repr=False)
    microbatches: list[Any]
    index: Any

    @cached_property
    def spec(self) -> BufferSpec:
        """The specification of the buffers."""
        return BufferSpec(self.replay, self.partition, self.ticks, self.split)

    def run(self, by_layer: Values, by_stage: Values, table: Any) -> tuple[Values, Values, list[Any]]:
        """Runs all ticks; returns the carried sums and states, and the results of all microbatches."""
        sums = {item.index for item in self.partition.sums}
        num_stages = self.ticks.num_stages
        first = self.index == 0
        started = {index: jnp.where(first, array, 0) if index in sums else array for index, array in by_stage.items()}
        initial = [
            {index: self._partial(index, array) for index, array in group.items()} for group in (by_layer, started)
        ]
        buffers = self.spec.blank(*initial)
        kinds = table[:, :, COLUMNS.index("kind")]
        active_kinds = jnp.stack([(kinds == kind).any(1) for kind in range(len(KINDS))], 1)
        buffers, _ = lax.scan(self._tick, self.spec.placed(buffers), (table, active_kinds))
        by_layer, by_stage = (
            {index: self._reduced(index, array) for index, array in carries.items()}
            for carries in (buffers.by_layer, buffers.by_stage)
        )
        by_stage = broadcast_carries(self.partition, by_stage, num_stages, self.index)
        return by_layer, by_stage, broadcast_results(self.partition, buffers.results, num_stages, self.index)

    def _partial(self, index: int, array: Any) -> Any:
        """Returns the initial value of a carry, as a partial sum if its reduction is deferred."""
        return add_partial_sum_dims(array, (), self.spec.deferred_axes(index), self.replay.mesh.shape)

    def _reduced(self, index: int, array: Any) -> Any:
        return self.replay.reduced(
            array, self.replay.constraints[self.partition.loop.body.outputs[index]], self.spec.deferred_axes(index)
        )

    def _tick(self, buffers: Buffers, row: tuple[Any, Any]) -> tuple[Buffers, None]:
        table, active_kinds = row
        placed = self.spec.placed
        columns = dict(zip(COLUMNS, table[self.index], strict=True))
        tasks = (self._forward, self._backward, self._weights)[: 3 if self.split else 2]
        num_tasks = self.ticks.num_microbatches * self.ticks.num_chunks
        num_ticks = self.ticks.num_ticks
        for kind, task in enumerate(tasks):
            active = columns["kind"] == kind

            def run(buffers: Buffers, task: Callable[..., Buffers] = task, active: Any = active) -> Buffers:
                return placed(task(buffers, columns | {"active": active}))

            with jax.named_scope(share_name(num_tasks, num_ticks)):
                buffers = lax.cond(active_kinds[kind] if self.lockstep else active, run, placed, buffers)

        def send_forward(buffers: Buffers) -> Buffers:
            arrives = columns["arrives_forward"]
            return placed(replace(buffers, forward=self._sent(buffers.forward, buffers.sends_forward, arrives, 1)))

        def send_backward(buffers: Buffers) -> Buffers:
            arrives = columns["arrives_backward"]
            return placed(replace(buffers, backward=self._sent(buffers.backward, buffers.sends_backward, arrives, -1)))

        for kind, send in enumerate((send_forward, send_backward)):
            with jax.named_scope(share_name(self.ticks.num_taken(KINDS[kind]), num_ticks)):
                buffers = lax.cond(active_kinds[kind], send, placed, buffers)
        return buffers, None

    def _sent(self, slots: Sequence[Any], arrays: Sequence[Any], slot: Any, step: int) -> list[Any]:
        """Returns the slots with what arrives from the stage `step` stages before this one."""
        ring = [(stage, (stage + step) % self.ticks.num_stages) for stage in range(self.ticks.num_stages)]
        received = [lax.ppermute(array, AXIS, ring) for array in arrays]
        return write_slots(slots, slot, received, slot >= 0)

    def _forward(self, buffers: Buffers, task: Task) -> Buffers:
        """Runs one microbatch through the layers of one chunk.

        The first chunk runs the front before them, the last chunk the head after them.
        """
        partition = self.partition
        loop = self.partition.forward
        part = self._part(task)
        micro = self._micro(task)
        states = {state.before: buffers.by_stage[state.index] for state in partition.states}

        def front() -> tuple[Any, Any, Any]:
            values = self.invariants | micro | states
            self.replay.ops(partition.front_ops, values)
            carried_values = self.replay.read(values, [*loop.carried, *partition.ridden])
            by_stage = self._accumulated(
                buffers.by_stage, values, "front", partition.states[: partition.num_front_states]
            )
            zeros = [self.spec.zeros(value) for value in partition.collected]
            return carried_values + zeros, by_stage, self._recorded(buffers.results, values, "front", task)

        def receive() -> tuple[Any, Any, Any]:
            return (
                [read_slot(array, task["received"]) for array in buffers.forward],
                buffers.by_stage,
                buffers.results,
            )

        payload, by_stage, results = self._choose(part == 0, front, receive)
        ridden = dict(zip(partition.ridden, payload[loop.num_carried :], strict=False))
        values = self.invariants | micro | ridden
        self.replay.ops(partition.forward_ops, values)
        before = {state.before: self._chunk(buffers.by_layer[state.index], task) for state in partition.layer_states}
        carried, stacked = self._layers(loop, payload[: loop.num_carried], values, self._chunks(task) | before, part)
        layer_outputs = dict(zip(loop.stacked, stacked, strict=True))
        num_sent = loop.num_carried + len(partition.ridden)
        collected = [
            self._collected(array, layer_outputs[value], part)
            for array, value in zip(payload[num_sent:], partition.collected, strict=True)
        ]
        by_layer = {
            state.index: self._put_chunk(buffers.by_layer[state.index], task, layer_outputs[state.after])
            for state in partition.layer_states
        }
        residuals = [(layer_outputs | before)[value] for value in self.spec.residuals] + [*ridden.values()]
        buffers = replace(
            buffers,
            by_layer=buffers.by_layer | by_layer,
            residuals=write_slots(buffers.residuals, task["residual"], residuals, self._is_active(task)),
            sends_forward=[*carried, *payload[loop.num_carried : num_sent], *collected],
        )

        def head() -> tuple[Any, Any, Any]:
            values = self.invariants | micro | states | ridden
            values |= dict(zip((*loop.results, *partition.collected), (*carried, *collected), strict=True))
            self.replay.ops(partition.head_ops, values)
            seeds = self.replay.read(values, partition.payload_backward)
            gradients = write_slots(buffers.backward, task["seeds"], seeds, self._is_active(task))
            new_by_stage = self._accumulated(by_stage, values, "head", partition.states[partition.num_front_states :])
            return gradients, new_by_stage, self._recorded(results, values, "head", task)

        is_last = part == self.ticks.num_parts - 1
        gradients, by_stage, results = self._choose(is_last, head, lambda: (buffers.backward, by_stage, results))
        return self._if_active(task, replace(buffers, backward=gradients), by_stage, results)

    def _backward(self, buffers: Buffers, task: Task) -> Buffers:
        """Runs the gradient of one microbatch through the layers of one chunk; the first chunk also runs the end."""
        partition = self.partition
        loop = self.partition.backward
        payload = [read_slot(array, task["received"]) for array in buffers.backward]
        residuals, ridden = self._residuals(buffers, task)
        returned = dict(zip(partition.returned, payload[loop.num_carried :], strict=True))
        inputs = self.invariants | self._micro(task) | ridden | returned
        values = dict(inputs)
        self.replay.ops(partition.backward_ops, values)
        part = self._part(task)
        chunks = self._chunks(task) | residuals
        carried, stacked = self._layers(loop, payload[: loop.num_carried], values, chunks, part, self.split)
        buffers = replace(buffers, sends_backward=[*carried, *returned.values()])
        if self.split is None:
            buffers = replace(buffers, by_layer=self._with_gradients(buffers.by_layer, task, stacked))
        else:
            weight_residuals = [*stacked, *returned.values()]
            split = write_slots(buffers.weight_residuals, task["split"], weight_residuals, self._is_active(task))
            buffers = replace(buffers, weight_residuals=split)

        def end() -> tuple[Any, Any]:
            values = inputs | dict(zip(loop.results, carried, strict=True))
            self.replay.ops(partition.end_ops, values)
            by_stage = self._accumulated(buffers.by_stage, values, "end", ())
            return by_stage, self._recorded(buffers.results, values, "end", task)

        by_stage, results = self._choose(part == 0, end, lambda: (buffers.by_stage, buffers.results))
        return self._if_active(task, buffers, by_stage, results)

    def _weights(self, buffers: Buffers, task: Task) -> Buffers:
        """Computes the weight gradients of one chunk for one microbatch."""
        assert self.split is not None, "only schedules with separate weight gradients have such tasks"
        loop = self.partition.backward
        split = self.split
        arrays = [read_slot(array, task["split"]) for array in buffers.weight_residuals]
        between = arrays[: len(split.between)]
        returned = dict(zip(self.partition.returned, arrays[len(split.between) :], strict=True))
        residuals, ridden = self._residuals(buffers, task)
        values = self.invariants | self._micro(task) | ridden | returned
        self.replay.ops(self.partition.backward_ops, values)
        scanned = self._operands(loop, values, self._chunks(task) | residuals, self._part(task))
        consts = self.replay.read(values, loop.consts)

        names = (*loop.body_consts, *loop.body_scanned, *split.between)
        outputs = split.outputs[loop.num_carried :]

        def layer(_: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            layer_values = dict(zip(names, [*consts, *xs], strict=True))
            self.replay.ops(split.second, layer_values)
            return [], self.replay.read(layer_values, outputs)

        _, stacked = self._scanned(layer, [], [*scanned, *between], outputs, self._part(task), reverse=False)
        return replace(buffers, by_layer=self._with_gradients(buffers.by_layer, task, stacked))

    def _layers(
        self,
        loop: Loop,
        carried: Sequence[Any],
        values: Values,
        chunks: Values,
        part: Any,
        split: SplitBackward | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Scans over the layers of one chunk; returns the carry, and stacked results (with `split`: residuals)."""
        consts = self.replay.read(values, loop.consts)
        scanned = self._operands(loop, values, chunks, part)

        def layer(carried: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            args = [*consts, *carried, *xs]
            if split is None:
                outs = self.replay.body(loop.body, args)
                return outs[: loop.num_carried], outs[loop.num_carried :]
            layer_values = dict(zip(loop.body.inputs, args, strict=True))
            self.replay.ops(split.first, layer_values)
            new_carry = self.replay.read(layer_values, split.outputs[: loop.num_carried])
            return new_carry, self.replay.read(layer_values, split.between)

        outputs = loop.body.outputs if split is None else (*loop.body.outputs[: loop.num_carried], *split.between)
        return self._scanned(layer, list(carried), scanned, outputs, part, reverse=loop.op.params["reverse"])

    def _scanned(
        self, layer: Layer, carried: list[Any], scanned: list[Any], outputs: Sequence[int], part: Any, *, reverse: bool
    ) -> tuple[list[Any], list[Any]]:
        """Scans a function over the rows of one chunk; a row of padding passes the carry on and returns zeros."""
        parts = self.spec.parts
        if not parts.num_short:
            return lax.scan(layer, carried, scanned, reverse=reverse, length=parts.num_rows)

        def constrained(new_carry: Sequence[Any], stacked: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            constraints = self.replay.constraints
            deferred = self.replay.unreduced.of
            arrays = zip([*new_carry, *stacked], outputs, strict=True)
            placed = [self.replay.constrained(array, constraints[value], deferred(value)) for array, value in arrays]
            return placed[: len(new_carry)], placed[len(new_carry) :]

        def row(carried: list[Any], xs: tuple[list[Any], Any]) -> tuple[list[Any], list[Any]]:
            run = partial(layer, carried, xs[0])
            avals = jax.eval_shape(run)[1]
            skip = lambda: constrained(carried, [jnp.zeros(aval.shape, aval.dtype) for aval in avals])  # noqa: E731
            return self._choose(xs[1], lambda: constrained(*run()), skip)

        is_layer = (jnp.arange(parts.num_rows) < parts.num_rows - 1) | parts.is_full(part)
        return lax.scan(row, carried, (scanned, is_layer), reverse=reverse, length=parts.num_rows)

    def _collected(self, array: Any, update: Any, part: Any) -> Any:
        """Returns the stacked results for the head, updated by one chunk; the next chunk overwrites padding."""
        has_padding = self.spec.parts.num_short
        padded = _with_extra_row(array) if has_padding else array
        collected = lax.dynamic_update_slice_in_dim(padded, update, self.spec.parts.first_layer(part), 0)
        return collected[: len(array)] if has_padding else collected

    def _operands(self, loop: Loop, values: Values, chunks: Values, part: Any) -> list[Any]:
        """Returns the stacked operands of a loop over layers, sliced to one chunk."""
        operands = []
        parts = self.spec.parts
        for value in loop.scanned:
            if value in chunks:
                operands.append(chunks[value])
            else:
                (array,) = self.replay.read(values, [value])
                array = _with_extra_row(array) if parts.num_short else array
                operands.append(lax.dynamic_slice_in_dim(array, parts.first_layer(part), parts.num_rows, 0))
        return operands

    def _part(self, task: Task) -> Any:
        """Returns the index of a chunk among all parts of the model."""
        return task["chunk"] * self.ticks.num_stages + self.index

    def _micro(self, task: Task) -> Values:
        """Returns the values of one microbatch."""
        pairs = zip(self.partition.loop.body_scanned, self.microbatches, strict=True)
        return {value: read_slot(array, task["microbatch"]) for value, array in pairs}

    def _residuals(self, buffers: Buffers, task: Task) -> tuple[Values, Values]:
        """Returns the residuals of a microbatch: those of the layers, and the values sent with the activations."""
        arrays = [read_slot(array, task["residual"]) for array in buffers.residuals]
        residuals = self.spec.residuals
        return dict(zip(residuals, arrays, strict=False)), dict(
            zip(self.partition.ridden, arrays[len(residuals) :], strict=True)
        )

    def _chunks(self, task: Task) -> Values:
        """Returns the rows of one chunk of all stacked operands."""
        return {value: self._chunk(array, task) for value, array in self.rows.items()}

    def _chunk(self, array: Any, task: Task, dim: int = 0) -> Any:
        if self.ticks.num_chunks == 1:
            return array
        return lax.dynamic_slice_in_dim(array, task["chunk"] * self.spec.parts.num_rows, self.spec.parts.num_rows, dim)

    def _put_chunk(self, array: Any, task: Task, new: Any, dim: int = 0) -> Any:
        new = jnp.where(task["active"], new, self._chunk(array, task, dim)) if self.lockstep else new
        return lax.dynamic_update_slice_in_dim(array, new, task["chunk"] * self.spec.parts.num_rows, dim)

    def _summand(self, carried_sum: Sum, part: Part, array: Any) -> Any:
        """Returns a summand in the dtype and the partial-sum form of its sum."""
        axes = self.spec.deferred_axes(carried_sum.index)
        return add_partial_sum_dims(
            converted(part, array), self.replay.unreduced.of(part.value), axes, self.replay.mesh.shape
        )

    def _with_gradients(self, by_layer: Values, task: Task, stacked: Sequence[Any]) -> Values:
        """Returns the sums with the weight gradients of one chunk and microbatch added."""
        gradients = dict(zip(self.partition.backward.stacked, stacked, strict=True))
        carries = dict(by_layer)
        for item in self.partition.sums:
            for part in item.parts.get("layers", ()):
                dim = len(self.spec.deferred_axes(item.index))
                axes = self.replay.unreduced.of(part.value)
                summand = self._summand(item, part, leading_before_stacked(gradients[part.value], axes))
                total = self._chunk(carries[item.index], task, dim) + summand
                carries[item.index] = self._put_chunk(carries[item.index], task, total, dim)
        return carries

    def _accumulated(self, by_stage: Values, values: Values, piece: str, states: Sequence[State]) -> Values:
        """Returns the sums with the summands of one piece added, and the states after that piece."""
        carries = dict(by_stage)
        for item in self.partition.sums:
            for part in item.parts.get(piece, ()):
                (array,) = self.replay.read(values, [part.value])
                carries[item.index] = carries[item.index] + self._summand(item, part, array)
        for state in states:
            (carries[state.index],) = self.replay.read(values, [state.after])
        return carries

    def _recorded(self, results: Sequence[Any], values: Values, piece: str, task: Task) -> list[Any]:
        """Returns the results of the microbatches, updated with those that one piece computes."""
        updated = list(results)
        for index, (value, source) in enumerate(self.partition.results):
            if source == piece:
                (array,) = self.replay.read(values, [value])
                updated[index] = lax.dynamic_update_index_in_dim(updated[index], array, task["microbatch"], 0)
        return updated

    def _choose(self, condition: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        if not self.lockstep:
            return lax.cond(condition, if_true, if_false)
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true(), if_false())

    def _is_active(self, task: Task) -> Any:
        return task["active"] if self.lockstep else True

    def _if_active(self, task: Task, buffers: Buffers, by_stage: Values, results: list[Any]) -> Buffers:
        """Returns the buffers; sums, states and results are updated only if the task belongs to this stage."""
        if self.lockstep:
            old = buffers.by_stage, buffers.results
            by_stage, results = jax.tree.map(lambda a, b: jnp.where(task["active"], a, b), (by_stage, results), old)
        return replace(buffers, by_stage=by_stage, results=results)


def converted(part: Part, array: Any) -> Any:
    """Returns a summand in the dtype of its sum."""
    for op in part.converts:
        (array,) = op.bind([array])
    return array


def _with_extra_row(array: Any) -> Any:
    return jnp.concatenate([array, array[-1:]])
