"""Allocates the buffers that a pipeline stage carries from tick to tick, and constrains their sharding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spanax.plan.pipeline.ticks import Ticks
from spanax.plan.sharding.layer_partition import Parts
from spanax.step.replay.replay import Replay
from spanax.trace.jaxpr.loops import SplitBackward
from spanax.trace.pipeline.partition import PipelinePartition


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Buffers:
    """The carry of a stage from tick to tick.

    Attributes:
      backward: slots for received gradients.
      by_layer: sums and states of layers, by index in the carry of the loop.
      by_stage: other sums and states.
      forward: slots for received activations.
      residuals: slots for residuals of the backward pass of a microbatch.
      results: one entry for each microbatch.
      sends_backward: gradients to send after this tick.
      sends_forward: activations to send after this tick.
      weight_residuals: slots for residuals of the weight gradients alone.
    """

    backward: list[Any]
    by_layer: dict[int, Any]
    by_stage: dict[int, Any]
    forward: list[Any]
    residuals: list[Any]
    results: list[Any]
    sends_backward: list[Any]
    sends_forward: list[Any]
    weight_residuals: list[Any]


@dataclass(frozen=True, eq=False)
class BufferSpec:
    """Shapes and shardings of the buffers of a stage.

    Attributes:
      replay: the replay inside of a stage.
      partition: the partition of the loop over microbatches.
      ticks: the tick table, which determines the number of slots.
      split: the split backward pass of a layer, if the schedule has separate weight gradients.
    """

    replay: Replay
    partition: PipelinePartition
    ticks: Ticks
    split: SplitBackward | None

    @cached_property
    def parts(self) -> Parts:
        """The partition of the layers over stages and chunks."""
        return Parts(self.partition.num_layers, self.ticks.num_stages, self.ticks.num_chunks)

    @cached_property
    def residuals(self) -> tuple[int, ...]:
        """Residuals of the layers: stacked results of the forward pass, and the initial states of the layers."""
        states = {state.before for state in self.partition.layer_states}
        available = {*self.partition.forward.stacked, *states}
        return tuple(dict.fromkeys(value for value in self.partition.backward.scanned if value in available))

    @property
    def between(self) -> tuple[int, ...]:
        """Values that the weight gradients read from the computation of the input gradients."""
        return self.split.between if self.split else ()

    @property
    def returned(self) -> tuple[int, ...]:
        """Values that the head sends back, if separate weight gradients may still need them."""
        return self.partition.returned if self.split else ()

    def deferred_axes(self, index: int) -> tuple[str, ...]:
        """Returns the mesh axes over which a carried value has not been reduced yet."""
        return self.replay.unreduced.of(self.partition.loop.body_carried[index])

    def zeros(self, value: int, *leading: int, num_scanned: int = 0) -> Any:
        """Returns zeros like a value, without its first `num_scanned` dims and with `leading` dims.

        Counts of each device's rows have their dims of devices after these.
        """
        aval = self.replay.graph.avals[value]
        devices = [self.replay.mesh.shape[axis] for axis in self.replay.unreduced.of(value)]
        return jnp.zeros((*leading, *devices, *aval.shape[num_scanned:]), aval.dtype)

    def blank(self, by_layer: dict[int, Any], by_stage: dict[int, Any]) -> Buffers:
        """Returns the buffers before the first tick, given the initial sums and states."""
        ticks = self.ticks
        partition = self.partition
        num_rows = self.parts.num_rows
        residuals = [self.zeros(value, ticks.num_in_flight, num_rows, num_scanned=1) for value in self.residuals]
        return Buffers(
            forward=[self.zeros(value, ticks.num_received[0]) for value in partition.payload_forward],
            backward=[self.zeros(value, ticks.num_received[1]) for value in partition.payload_backward],
            sends_forward=[self.zeros(value) for value in partition.payload_forward],
            sends_backward=[self.zeros(value) for value in partition.payload_backward],
            residuals=residuals + [self.zeros(value, ticks.num_in_flight) for value in partition.ridden],
            weight_residuals=[self.zeros(value, ticks.num_split, num_rows) for value in self.between]
            + [self.zeros(value, ticks.num_split) for value in self.returned],
            results=[self.zeros(value, ticks.num_microbatches) for value, _ in partition.results],
            by_layer=by_layer,
            by_stage=by_stage,
        )

    def placed(self, buffers: Buffers) -> Buffers:
        """Constrains all buffers to the sharding of their values over the other mesh axes.

        Both branches of a conditional must return the same shardings: XLA rejects a mismatch.
        """
        partition = self.partition
        constrained = self.replay.constrained
        devices = self.replay.unreduced.of
        constraints = self.replay.constraints
        forward = partition.forward
        backward = partition.backward
        forward_values = [*forward.body.outputs[: forward.num_carried], *partition.ridden, *partition.collected]
        backward_values = [*backward.body.outputs[: backward.num_carried], *partition.returned]
        layer_outputs = dict(zip(forward.stacked, forward.body.outputs[forward.num_carried :], strict=True))
        outputs = partition.loop.body.outputs
        num_layers = len(self.residuals)
        num_between = len(self.between)

        def constrain_all(arrays: Sequence[Any], values: Sequence[int], num_leading: int) -> list[Any]:
            return [
                constrained(array, constraints[value], (*(None,) * num_leading, *devices(value)))
                for array, value in zip(arrays, values, strict=True)
            ]

        layers = [
            constrained(array, constraints[layer_outputs[value]], (None, None, *devices(value)))
            if value in layer_outputs
            else array
            for array, value in zip(buffers.residuals, self.residuals, strict=False)
        ]

        def constrain_carries(arrays: dict[int, Any]) -> dict[int, Any]:
            return {
                index: constrained(array, constraints[outputs[index]], self.deferred_axes(index))
                for index, array in arrays.items()
            }

        return replace(
            buffers,
            forward=constrain_all(buffers.forward, forward_values, 1),
            backward=constrain_all(buffers.backward, backward_values, 1),
            sends_forward=constrain_all(buffers.sends_forward, forward_values, 0),
            sends_backward=constrain_all(buffers.sends_backward, backward_values, 0),
            residuals=layers + constrain_all(buffers.residuals[num_layers:], partition.ridden, 1),
            weight_residuals=constrain_all(buffers.weight_residuals[:num_between], self.between, 2)
            + constrain_all(buffers.weight_residuals[num_between:], self.returned, 1),
            by_layer=constrain_carries(buffers.by_layer),
            by_stage=constrain_carries(buffers.by_stage),
        )


def read_slot(array: Any, index: Any) -> Any:
    """Returns one slot of a buffer; slot 0 for an index of -1, whose value is unused."""
    return lax.dynamic_index_in_dim(array, jnp.maximum(index, 0), 0, keepdims=False)


def write_slots(buffers: Sequence[Any], slot: Any, arrays: Sequence[Any], condition: Any) -> list[Any]:
    """Writes each array to a slot of its buffer; a no-op where `condition` is false."""
    index = jnp.maximum(slot, 0)

    def write(old: Any, new: Any) -> Any:
        new = new if condition is True else jnp.where(condition, new, read_slot(old, index))
        return lax.dynamic_update_index_in_dim(old, new, index, 0)

    return [write(old, new) for old, new in zip(buffers, arrays, strict=True)]
