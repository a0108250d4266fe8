"""The sequences of a generation: where they are, and what computes their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from spanax.decoding.decoder import called
from spanax.decoding.derive.sequences import Incremental, Recomputation, prefilled
from spanax.decoding.programs import arrays_of, programs_of
from spanax.jit.jit import jit
from spanax.jit.placement import LossOptions
from spanax.plan.advice.generation import are_gathered
from spanax.plan.place import anchored, as_planned
from spanax.plan.plan import Plan
from spanax.plan.sharding.resolve import axes_of
from spanax.step.compiled_function import CompiledFunction
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class Rows:
    """The sequences of a generation, which are computed as planned; without a plan, where the parameters are.

    Attributes:
      derived: the form of the forward pass.
      num_sequences: the sequences to generate.
      planned: prefill and decode step on a mesh, of a number of sequences that it divides.
    """

    derived: Incremental | Recomputation
    num_sequences: int
    planned: tuple[CompiledFunction, CompiledFunction] | None = None

    @classmethod
    def of(cls, model: Any, derived: Incremental | Recomputation, num_sequences: int, **options: Any) -> "Rows":
        """Returns sequences under options of `spanax.jit`, planned for the decode step.

        Args:
          model: the model.
          derived: the form of its forward pass.
          num_sequences: the sequences that generate together.
          **options: `layout`, `mesh` and `like`; None for those that are not given.

        Raises:
          SpanaxError: the options are invalid.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if not given:
            return cls(derived, num_sequences)
        placement = jit(called, **given).placement
        parameters = arrays_of(model)

        def planned(program: Program, *, is_like: bool) -> Plan:
            return placement.plan_for(program, LossOptions(), parameters, is_like=is_like)

        # Planned for a number of sequences that every mesh divides; then for those that the layout needs.
        count = _rounded(num_sequences, len(jax.devices()))
        with placement.turns:
            prefill, step = programs_of(model, derived, count)
            plan = planned(step, is_like="like" in given)
            needed = _rounded(num_sequences, plan.mesh.ways(plan.batch[0].spec[0]))
            if needed != count:
                prefill, step = programs_of(model, derived, needed)
                plan = planned(step, is_like=True)
            plan = _gathered(step, plan, placement.cluster().memory_bytes)
            specs = {leaf.path: leaf.spec for leaf in plan.leaves}
            filling = replace(planned(prefill, is_like=True), layout=plan.layout)
            filling = anchored(prefill, filling, specs)
        pairs = (prefill, filling), (step, plan)
        first, second = (
            CompiledFunction(as_planned(program, each), each, placement.mesh, donate=False) for program, each in pairs
        )
        return cls(derived, num_sequences, (first, second))

    def parameters(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the parameters where they are read."""
        if self.planned is None:
            return list(arrays)
        return [*map(jax.device_put, arrays, self.planned[1].state[: len(arrays)])]

    def placed(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns arrays with the sequences along dim 0, sharded; the last one is repeated to fill the shards."""
        if self.planned is None:
            return [jnp.asarray(array) for array in arrays]
        prefill, _ = self.planned
        count = prefill.program.batch_size
        missing = count - self.num_sequences
        padded = [jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)], mode="edge") for array in arrays]
        return [*map(jax.device_put, padded, prefill.batch)]

    def prefilled(self, parameters: Sequence[Any], arrays: Sequence[Any], lengths: Any) -> tuple[Any, Any]:
        """Returns the logits [sequences, vocabulary] after the last tokens, and the caches."""
        if self.planned is None:
            return prefilled(self.derived, parameters, arrays, lengths)
        prefill, _ = self.planned
        leaves = prefill.program.leaves[len(parameters) :]
        empty = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        return _replayed(prefill, parameters, empty, [*arrays, lengths])

    def stepped(self, parameters: Sequence[Any], caches: Any, rows: Sequence[Any], positions: Any) -> tuple[Any, Any]:
        """Returns the logits [sequences, vocabulary] of one more token at each position, and the caches."""
        if self.planned is None:
            return self.derived.step(parameters, caches, rows, positions)
        return _replayed(self.planned[1], parameters, caches, [*rows, positions])


def _rounded(count: int, ways: int) -> int:
    """Returns the multiple of a number from a count on."""
    return -(-count // ways) * ways


def _gathered(step: Program, plan: Plan, limit: float | None) -> Plan:
    """Returns the plan of a decode step with parameters gathered once, since every token reads them, if they fit."""
    stored = {*plan.layout.stored_params}
    parameters = [leaf for leaf in plan.leaves if leaf.kind == "param"]
    num_bytes = sum(leaf.local_bytes * plan.mesh.ways([*axes_of(leaf.spec) & stored]) for leaf in parameters)
    if not are_gathered(num_bytes, limit):
        return plan
    whole = {
        leaf.path: tuple(tuple(axis for axis in by if axis not in stored) for by in leaf.spec) for leaf in parameters
    }
    plan = replace(plan, layout=replace(plan.layout, stored_params=()))
    return anchored(step, plan, {leaf.path: whole.get(leaf.path, leaf.spec) for leaf in plan.leaves})


def _replayed(
    function: CompiledFunction, parameters: Sequence[Any], caches: Sequence[Any], arrays: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Returns the logits and the caches of prefill or step, as planned."""
    *after, logits = function.outputs([*parameters, *caches, *arrays])
    first = len(parameters)
    return logits, jax.lax.with_sharding_constraint(after[first:], function.state[first:])
