"""The load of the experts of a step: how unevenly its router sends tokens, measured in the step itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from spanax.plan.plan import Plan
from spanax.step.replay.replay import Replay
from spanax.trace.jaxpr.stacked import Stacked, with_stacked
from spanax.trace.program import Program

EXPERT_LOAD = "expert_load"
"""The metric of the busiest expert: its tokens over the mean of all experts, in the layer where this is largest."""

DEVICE_LOAD = "expert_device_load"
"""The metric of the busiest device along `expert`: the tokens of its experts over the mean of these devices, in the
mean of all layers. It is the `imbalance` that a plan assumes to be 1."""


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """Measures the load of experts by the choices of a step's routers.

    Attributes:
      replay: the replay of the step, whose last results are the choices.
      choices: these results, each with the number of experts.
      is_accumulated: whether the outermost loop runs over microbatches.
      ways: the number of devices along `expert`.
    """

    replay: Replay
    choices: tuple[tuple[Stacked, int], ...]
    is_accumulated: bool
    ways: int

    @staticmethod
    def of(replay: Replay, program: Program, plan: Plan) -> "ExpertLoad | None":
        """Returns what measures the load in a step; None without experts, in a pipeline, and where the step does it."""
        results = program.step.traced.results
        if plan.schedule.num_stages > 1 or (isinstance(results, Mapping) and EXPERT_LOAD in results):
            return None
        number_of = program.step.chosen_experts
        graph, found = with_stacked(replay.graph, number_of)
        if not found:
            return None
        num_new = len(graph.avals) - len(replay.graph.avals)
        constraints = [*replay.constraints, *[None] * num_new]
        forms = replay.forms
        forms = None if forms is None else replace(forms, constraints=[*forms.constraints, *[None] * num_new])
        tapped = replace(replay, graph=graph, constraints=constraints, forms=forms)
        choices = tuple((each, number_of[each.inner]) for each in found)
        return ExpertLoad(tapped, choices, program.microbatches > 1, plan.mesh.ways(["expert"]))

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that it measures."""
        return (EXPERT_LOAD, DEVICE_LOAD) if self.ways > 1 else (EXPERT_LOAD,)

    def measured(self, choices: Sequence[Any]) -> list[Any]:
        """Returns the metrics, of the last results of the step."""
        by_expert = list[Any]()
        by_device = list[Any]()
        for chosen, (stacked, number) in zip(choices, self.choices, strict=True):
            counts = self._counts(chosen, stacked, number)
            mean = counts.mean(1)
            by_expert.append(counts.max(1) / mean)
            of_devices = counts.reshape(len(counts), self.ways, -1).sum(2)
            by_device.append(of_devices.max(1) / of_devices.mean(1))
        loads = [jnp.concatenate(by_expert).max(), jnp.concatenate(by_device).mean()]
        return loads[: len(self.names)]

    def _counts(self, chosen: Any, stacked: Stacked, number: int) -> Any:
        """Returns the tokens of every expert, one row for each layer."""
        num_loops = len(stacked.lengths)
        is_chosen = chosen[..., None] == jnp.arange(number, dtype=chosen.dtype)
        counts = is_chosen.sum(range(num_loops, chosen.ndim), dtype=jnp.int32)
        if self.is_accumulated and num_loops:
            counts = counts.sum(0)
        return counts.reshape(-1, number).astype(jnp.float32)
