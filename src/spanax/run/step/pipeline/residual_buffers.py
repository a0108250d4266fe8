"""Held: what a stage of a pipeline keeps from tick to tick, how much of it there is, and how it is split."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from spanax.plan.pipeline.layer_partition import Parts
from spanax.plan.pipeline.ticks import Ticks
from spanax.run.step.replay.replay import Replay
from spanax.trace.pipeline.partition import PipelinePartition
from spanax.trace.pipeline.split_backward import SplitBackward

Held = dict[str, Any]
"""What a stage holds, by what it is:

`forward`, `backward`: slots for what has arrived; `sends_forward`, `sends_backward`: what goes on after this tick;
`kept`: slots for what the way back needs of a microbatch; `split`: slots for what only weights still need;
`by_rows`, `by_stage`: sums and states, by their place among the carried values; `results`: one entry a microbatch.
"""


@dataclass(frozen=True, eq=False)
class Storage:
    """What a stage has to hold.

    Attributes:
      replay: how operations run inside of a stage.
      cut: the loop over microbatches in pieces.
      ticks: the table, which says how many slots there are.
      halves: a layer's way back in two, where the table takes it apart.
    """

    replay: Replay
    cut: PipelinePartition
    ticks: Ticks
    halves: SplitBackward | None

    @cached_property
    def parts(self) -> Parts:
        """Which layers each chunk has."""
        return Parts(self.cut.num_layers, self.ticks.num_stages, self.ticks.num_chunks)

    @property
    def num_rows(self) -> int:
        """How many rows one chunk has: its layers, and the padding."""
        return self.parts.num_rows

    @cached_property
    def residuals(self) -> tuple[int, ...]:
        """What the layers leave for their way back: stacked results, and the states they began with."""
        states = {state.before for state in self.cut.layer_states}
        wanted = {*self.cut.forward.stacked, *states}
        return tuple(dict.fromkeys(value for value in self.cut.backward.scanned if value in wanted))

    @property
    def between(self) -> tuple[int, ...]:
        """What the gradients of weights take from those of the input."""
        return self.halves.between if self.halves else ()

    @property
    def returned(self) -> tuple[int, ...]:
        """What the head handed back, as far as the gradients of weights come later and may still need it."""
        return self.cut.returned if self.halves else ()

    def deferred_axes(self, index: int) -> tuple[str, ...]:
        """Returns the mesh axes over which a carried value has not been reduced yet."""
        return self.replay.unreduced.of(self.cut.loop.body_carried[index])

    def zeros(self, value: int, *leading: int, num_scanned: int = 0) -> Any:
        """An array like a value, without its first `num_scanned` dims and with others in front."""
        aval = self.replay.graph.avals[value]
        return jnp.zeros((*leading, *aval.shape[num_scanned:]), aval.dtype)

    def blank(self) -> Held:
        """Everything but sums and states, before the first tick."""
        ticks = self.ticks
        kept = [self.zeros(value, ticks.num_in_flight, self.num_rows, num_scanned=1) for value in self.residuals]
        return {
            "forward": [self.zeros(value, ticks.num_received[0]) for value in self.cut.payload_forward],
            "backward": [self.zeros(value, ticks.num_received[1]) for value in self.cut.payload_backward],
            "sends_forward": [self.zeros(value) for value in self.cut.payload_forward],
            "sends_backward": [self.zeros(value) for value in self.cut.payload_backward],
            "kept": kept + [self.zeros(value, ticks.num_in_flight) for value in self.cut.ridden],
            "split": [self.zeros(value, ticks.num_split, self.num_rows) for value in self.between]
            + [self.zeros(value, ticks.num_split) for value in self.returned],
            "results": [self.zeros(value, ticks.num_microbatches) for value, _ in self.cut.results],
        }

    def placed(self, held: Held) -> Held:
        """All that is held, split over the other mesh axes as its values are.

        What a task gives and what is there without it must be split alike: XLA refuses a condition of two minds.
        """
        cut, fix, of = self.cut, self.replay.constrained, self.replay.constraints
        forward, backward = cut.forward, cut.backward
        going = [*forward.body.outputs[: forward.num_carried], *cut.ridden, *cut.collected]
        coming = [*backward.body.outputs[: backward.num_carried], *cut.returned]
        of_layer = dict(zip(forward.stacked, forward.body.outputs[forward.num_carried :], strict=True))
        outputs, num_layers, num_between = cut.loop.body.outputs, len(self.residuals), len(self.between)

        def each(arrays: Sequence[Any], values: Sequence[int], num_leading: int) -> list[Any]:
            return [fix(array, of[value], (None,) * num_leading) for array, value in zip(arrays, values, strict=True)]

        layers = [
            fix(array, of[of_layer[value]], (None, None)) if value in of_layer else array
            for array, value in zip(held["kept"], self.residuals, strict=False)
        ]
        return held | {
            "forward": each(held["forward"], going, 1),
            "backward": each(held["backward"], coming, 1),
            "sends_forward": each(held["sends_forward"], going, 0),
            "sends_backward": each(held["sends_backward"], coming, 0),
            "kept": layers + each(held["kept"][num_layers:], cut.ridden, 1),
            "split": each(held["split"][:num_between], self.between, 2)
            + each(held["split"][num_between:], self.returned, 1),
            "by_rows": {
                at: fix(array, of[outputs[at]], self.deferred_axes(at)) for at, array in held["by_rows"].items()
            },
            "by_stage": {
                at: fix(array, of[outputs[at]], self.deferred_axes(at)) for at, array in held["by_stage"].items()
            },
        }
