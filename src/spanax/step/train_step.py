"""The train step of a program and its evaluation, compiled under the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spanax.hardware.flags import for_platform
from spanax.plan.pipeline.stages import inside_stage
from spanax.plan.place import resolver_of
from spanax.plan.plan import Plan
from spanax.plan.sharding.operands import OperandSharding, operand_shardings
from spanax.plan.sharding.pieces import Forms
from spanax.plan.sharding.resolve import Constraint
from spanax.plan.spmd.deferred_reductions import counts_by_device, unreduced
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.step.expert_load import ExpertLoad
from spanax.step.guard import STEP_OK, Guard
from spanax.step.guarded_step import GuardedStep
from spanax.step.pipeline.layer_order import LayerOrder, layer_order
from spanax.step.pipeline.layer_padding import PaddedStep
from spanax.step.pipeline.pipeline import pipelined_replay
from spanax.step.placement import abstract_arrays, platform_of, to_device, to_host
from spanax.step.replay.replay import Replay
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.graph import Op
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class PlacedProgram:
    """A program on the mesh of its plan."""

    program: Program
    plan: Plan
    mesh: jax.sharding.Mesh

    @cached_property
    def rows(self) -> LayerOrder | None:
        """The row order of stacked arrays, if it differs from the order of the layers."""
        return layer_order(self.program, self.plan)

    @cached_property
    def state(self) -> list[NamedSharding]:
        """The sharding of every leaf of the state."""
        return [placement.sharding(self.mesh) for placement in self.plan.leaves]

    @cached_property
    def batch(self) -> list[NamedSharding]:
        """The sharding of every leaf of the batch."""
        return [placement.sharding(self.mesh) for placement in self.plan.batch]

    @cached_property
    def abstract(self) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        """The abstract state and batch."""
        state = abstract_arrays(self.program.leaves, self.plan.leaves, self.mesh)
        if self.rows is not None:
            pairs = zip(state, self.rows.shapes, strict=True)
            state = [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding) for leaf, shape in pairs]
        return state, abstract_arrays(self.program.batch, self.plan.batch, self.mesh)

    @property
    def is_simulated(self) -> bool:
        """Whether the mesh has several devices on CPUs."""
        return self.mesh.size > 1 and platform_of(self.mesh) == "cpu"

    def replay(
        self, traced: StepAnalysis, padded: PaddedStep | None = None, *, is_step: bool, inputs_only: bool = False
    ) -> Replay:
        """Returns the replay of a step, or of an evaluation, under the sharding constraints of the plan.

        Args:
          traced: the step or the evaluation.
          padded: the step around a pipeline with padded rows.
          is_step: whether `traced` is the step.
          inputs_only: constrain only inputs and outputs, no intermediate values.
        """
        plan = self.plan
        rows = self.rows
        # An evaluation takes the layers without padding, whose number is not a multiple of the stages.
        is_unpadded = not is_step and rows is not None and rows.is_padded
        resolver = resolver_of(self.program, inside_stage(plan) if is_unpadded else plan)

        def replay(traced: StepAnalysis) -> Replay:
            constraints = resolver.constraints(traced)
            pinned: list[Constraint | None] = [None] * len(constraints)
            if inputs_only:
                return Replay(traced.graph, pinned, {}, self.mesh)
            sharded = ShardedProgram(resolver, traced)
            deferred = unreduced(sharded, plan.schedule) if is_step else counts_by_device(sharded)
            uses = operand_shardings(resolver, traced, constraints)
            unconstrained = _unconstrained(traced, uses, constraints)
            pinned = [None if value in unconstrained else constraint for value, constraint in enumerate(constraints)]
            exclusive = () if plan.schedule.num_stages > 1 else resolver.layout.exclusive
            forms = Forms(traced.graph, traced.axes, constraints, resolver.mesh, exclusive)
            return Replay(traced.graph, pinned, uses, self.mesh, deferred, forms=None if forms.is_empty else forms)

        if inputs_only or not is_step:
            result = replay(traced if padded is None else padded.step)
        else:
            padded_replay = None if padded is None else (replay(padded.step), padded)
            result = pipelined_replay(replay(traced), traced, plan.schedule, rows, padded_replay)
        return replace(result, defers_errors=self.is_simulated)

    def _replicated(self, count: int) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, PartitionSpec())] * count


@dataclass(frozen=True, eq=False)
class EvalStep(PlacedProgram):
    """The evaluation of a program."""

    def jitted(self, traced: StepAnalysis) -> Any:
        """Returns the jitted function from state and batch to the metrics of an evaluation."""
        replay = self.replay(traced, is_step=False)

        def evaluate(state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            before = to_device(state, self.state)
            if self.rows is not None:
                before = self.rows.to_layers(before)
            return replay.body(replay.graph.body, [*before, *batch])

        metrics = self._replicated(traced.num_results)
        return jax.jit(evaluate, in_shardings=(self.state, self.batch), out_shardings=metrics)


@dataclass(frozen=True, eq=False)
class TrainStep(PlacedProgram):
    """The train step of a program.

    Attributes:
      guard: decides which steps are bad.
      inputs_only: constrain only the shardings of inputs and outputs; for analysis, not for training.
      measures_load: whether the load of experts is among the metrics.
    """

    guard: Guard | None = None
    inputs_only: bool = False
    measures_load: bool = False

    @cached_property
    def guarded(self) -> GuardedStep | None:
        """The checks of the guard that run on the devices."""
        return GuardedStep.of(self.guard, self.program, self.rows)

    @cached_property
    def load(self) -> ExpertLoad | None:
        """What measures the load of experts; None where nothing does."""
        return ExpertLoad.of(self._replay, self.program, self.plan) if self.measures_load else None

    @property
    def added(self) -> tuple[str, ...]:
        """The metrics that follow those of the program."""
        loads = () if self.load is None else self.load.names
        return loads if self.guarded is None else (*loads, STEP_OK)

    def jitted(self, *, keep_unused: bool = False) -> Any:
        """Returns the jitted function from state, batch and limits to the next state and the metrics."""
        return self._jitted(self.step, self.batch, keep_unused)

    def jitted_loop(self, num_steps: int) -> Any:
        """Returns the same for a list of batches, one for each step; it stacks metrics to shape [steps, ...].

        For models whose step takes less time than its dispatch from the host.
        """

        def take(initial: Sequence[Any], batches: Sequence[Sequence[Any]], *limits: Any) -> tuple[list[Any], list[Any]]:
            def body(state: Sequence[Any], batch: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                after, metrics = self.step(state, batch, *limits)
                # Otherwise XLA may carry the state under other shardings and reshard it at the end of every call.
                return list(map(_constrained, after, self.state)), metrics

            stacked = [
                _constrained(jnp.stack(arrays), NamedSharding(self.mesh, PartitionSpec(None, *sharding.spec)))
                for *arrays, sharding in zip(*batches, self.batch, strict=True)
            ]
            return jax.lax.scan(body, list(initial), stacked)

        return self._jitted(take, [self.batch] * num_steps)

    def _jitted(self, function: Any, batch: Any, keep_unused: bool = False) -> Any:
        is_guarded = self.guarded is not None
        platform = platform_of(self.mesh)
        # Output shardings are explicit: otherwise XLA reshards a replicated bias after the first step and recompiles.
        return jax.jit(
            function,
            in_shardings=(self.state, batch, *self._replicated(is_guarded)),
            out_shardings=(self.state, self._replicated(self.program.step.num_results + len(self.added))),
            donate_argnums=0,
            keep_unused=keep_unused,
            compiler_options=for_platform(self.plan.xla_flags, platform) if platform else None,
        )

    @cached_property
    def _padded(self) -> PaddedStep | None:
        rows = self.rows
        if rows is None or not rows.is_padded:
            return None
        return PaddedStep(self.program.step, self.program.resized(rows.shapes), rows)

    @cached_property
    def _replay(self) -> Replay:
        return self.replay(self.program.step, self._padded, is_step=True, inputs_only=self.inputs_only)

    def step(self, state: Sequence[Any], batch: Sequence[Any], *limits: Any) -> tuple[list[Any], list[Any]]:
        """Returns the next state and the metrics of traced arrays; `jit_step` is the name of the compiled program."""
        num_leaves = len(self.program.leaves)
        before = to_device(state, self.state)
        load = self.load
        replay = self._replay if load is None else load.replay
        outputs = replay.body(replay.graph.body, [*before, *batch])
        after = outputs[:num_leaves]
        end = num_leaves + self.program.step.num_results
        metrics = outputs[num_leaves:end]
        if self.rows is not None:
            values = self.program.step.graph.body.outputs[num_leaves:]
            dims = [self._layer_dim(value) for value in values]
            metrics = list(map(self.rows.to_layers_along, metrics, dims))
        if load is not None:
            metrics = [*metrics, *load.measured(outputs[end:])]
        if self.guarded is not None:
            after, metrics = self.guarded.finish(before, after, metrics, *limits)
        return to_host(after, self.state), metrics

    def _layer_dim(self, value: int) -> int | None:
        if self._padded is not None:
            return self._padded.dim(value)
        return None if self.rows is None else self.rows.dim(self.program.step, value)


def _constrained(array: Any, sharding: NamedSharding) -> Any:
    return array if sharding.mesh.size == 1 else jax.lax.with_sharding_constraint(array, sharding)


def _unconstrained(
    traced: StepAnalysis, op_shardings: Mapping[Op, OperandSharding], constraints: Sequence[Constraint | None]
) -> set[int]:
    """Returns uniform values that an operation reshards for itself, and those that only such values depend on.

    They are computed where they are used: a constraint to another sharding would gather them.
    """
    resharded = {
        value
        for op, use in op_shardings.items()
        for value, constraint in zip(op.inputs, use.inputs, strict=True)
        if constraint
    }
    loops = (op for op in traced.graph.ops() if op.name == "scan")
    carried = (pair for op in loops for pair in traced.graph.wires(op).inputs)
    resharded |= {outer for outer, inner in carried if constraints[outer] != constraints[inner]}
    unconstrained = resharded & traced.uniform
    pinned = {*traced.graph.body.outputs} - resharded
    for op in reversed([*traced.graph.ops()]) if unconstrained else ():
        if op.outputs and unconstrained.issuperset(op.outputs) and pinned.isdisjoint(op.outputs):
            unconstrained |= traced.uniform.intersection(op.inputs)
            continue
        pairs = traced.graph.wires(op).inputs if op.bodies else ()
        used = {outer for outer, inner in pairs if inner not in unconstrained - pinned}
        passed = {outer for outer, _ in pairs} - used
        unconstrained |= traced.uniform & passed
        pinned.update({*op.inputs, *(value for body in op.bodies for value in body.outputs)} - resharded - passed)
    return unconstrained - pinned
