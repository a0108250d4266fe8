"""Run: a program on devices. It obeys its plan and decides nothing."""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from spanax.errors import SpanaxError
from spanax.hardware.flags import for_platform
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import as_planned
from spanax.run.data.batches import Batches
from spanax.run.distributed.compile_barrier import compiled_with_barrier
from spanax.run.evaluation import num_fewer, smaller_evaluation
from spanax.run.state.placement import abstract_arrays, assert_placed, build_mesh
from spanax.run.state.program_digest import meta_of
from spanax.run.state.sharded_init import init_sharded_state
from spanax.run.state.weights import Loaded, load
from spanax.run.step.guard import LATE, STEP_OK, WATCHED, Guard, History, check_several
from spanax.run.step.guarded_step import GuardedStep, unsound
from spanax.run.step.multi_step import multi_step
from spanax.run.step.pipeline.layer_order import LayerOrder, layer_order
from spanax.run.step.pipeline.layer_padding import PaddedStep
from spanax.run.step.platform import platform_of
from spanax.run.step.replay.sharded_function import sharded_function
from spanax.run.step.validate_batch import validate_batch
from spanax.run.store import checkpoint
from spanax.run.training_signal_warnings import FirstStep, warn_user
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.program import Program
from spanax.trace.user_mesh import methods_outside_meshes, outside_meshes


@methods_outside_meshes
@dataclass(eq=False)
class Run:
    """A program's state on a mesh, and the compiled step that moves it on.

    `num_steps` counts the steps taken since the state was born, over restarts too; `position` is the data
    position that the state was saved with, where it was restored. `guard` says which steps are bad, `history` what the
    good ones of late returned; `loaded` lists the weights that `init` gave it.

    Example:
      >>> import numpy as np, optax, spanax
      >>> batch = np.ones((8, 16), "float32")
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=batch,
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
      >>> first, second = (float(run.step(batch)["loss"]) for _ in range(2))
      >>> second < first, run.num_steps, run.params()["kernel"].sharding.shard_shape((16, 32))
      (True, 2, (16, 4))
    """

    program: Program
    plan: Plan = field(repr=False)
    mesh: jax.sharding.Mesh
    state: list[jax.Array] = field(repr=False)
    num_steps: int = 0
    position: dict[str, Any] | None = field(default=None, repr=False)
    guard: Guard | None = None
    history: History = field(default_factory=History, repr=False)
    loaded: Loaded | None = field(default=None, repr=False)
    warn: Callable[[str], None] = field(default=warn_user, repr=False)
    _first_step: FirstStep = field(default_factory=FirstStep, repr=False)
    _compiled: dict[str, Any] = field(default_factory=dict, repr=False)
    _returned: deque[tuple[int, Any, dict[str, Any]]] = field(default_factory=deque, repr=False)
    _num_last: int = field(default=1, repr=False)

    def step(self, batch: Any) -> dict[str, Any]:
        """One train step: the state moves on, the metrics come back as arrays.

        A step that a guard with `skip` finds bad counts, and leaves the state as it was: its `step_ok` is False.

        Raises:
          SpanaxError: the batch is not the one that the program was traced with.
        """
        leaves = validate_batch(self.program, self._batch_shardings, batch)
        function = self._compiled.get("step") or self._stepping()
        self.state, metrics = function(self.state, leaves, *self._limits())
        found = self._moved_on(1, metrics)
        if self.guard is not None:
            self._returned.append((self.num_steps, (), found))
        return found

    def steps(self, batches: Sequence[Any]) -> dict[str, Any]:
        """So many train steps in one call of the devices, for steps that take them less time than the host.

        The metrics come as those of `step`, with a first dim of steps. The numbers are those of `step`, too, as far as
        the compiler rounds alike in a loop. A call of another length is another program to compile.

        Raises:
          SpanaxError: there is no batch, one is not as traced, or the guard's limits change from step to step.

        Example:
          >>> import optax, spanax
          >>> build, loss = lambda rngs: nnx.Linear(4, 8, rngs=rngs), lambda model, x: (model(x) ** 2).mean()
          >>> batch = np.ones((8, 4), "float32")
          >>> program = spanax.trace(build=build, optimizer=optax.sgd(0.1), batch=batch, loss=loss)
          >>> run = start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
          >>> run.steps([batch] * 4)["loss"].shape, run.num_steps
          ((4,), 4)
        """
        check_several(self.guard, len(batches))
        leaves = [validate_batch(self.program, self._batch_shardings, batch) for batch in batches]
        function = self._compiled.get(f"{len(batches)} steps") or self._stepping(len(batches))
        self.state, metrics = function(self.state, leaves, *self._limits(len(batches)))
        found = self._moved_on(len(batches), metrics)
        if self.guard is not None:
            before = self.num_steps - len(batches)
            self._returned.extend((before + 1 + at, at, found) for at in range(len(batches)))
        return found

    def judge(self, step: int, values: Mapping[str, Any]) -> str | None:
        """Why a step that was taken is bad by what it returned, as plain numbers; None where it is good."""
        if self.guard is None:
            return None
        self._note(step - 1)
        return self.guard.reason(self.history, step, values)

    def unsound(self) -> list[str]:
        """Paths of the state that must not be kept: parameters that are not finite, a NaN anywhere; one pass."""
        if "unsound" not in self._compiled:
            whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
            self._compiled["unsound"] = jax.jit(partial(unsound, self.program, self._rows), out_shardings=whole)
        found = np.asarray(self._compiled["unsound"](self.state))
        return [leaf.path for leaf, is_bad in zip(self.program.leaves, found, strict=True) if is_bad]

    def go_back(self, begin: Callable[[], "Run"]) -> None:
        """Take over the state, the step and the history of a run begun anew; what is compiled stays."""
        for array in self.state:
            array.delete()  # there may be no room for two states
        begun = begin()
        self.state, self.num_steps = begun.state, begun.num_steps
        self.position, self.history, self.loaded = begun.position, begun.history, begun.loaded
        self._returned.clear()

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """The loss and its metrics on a batch, in evaluation mode; the state does not change.

        A batch may have fewer examples than the traced one, as the last one of a dataset. Each size is compiled once.
        """
        evaluation = self.program.evaluation
        if evaluation is None:
            raise SpanaxError(
                "this program has no evaluation: it was traced from a train_step.",
                fix="trace it with loss=..., or evaluate run.model() yourself",
            )
        if count := num_fewer(self.program, batch):
            name = f"evaluation of {count}"
            if name not in self._compiled:
                self._compiled[name] = smaller_evaluation(self.program, self.plan, self.mesh, self._rows, count)
            found: dict[str, Any] = self._compiled[name](self.state, batch)
            self._settle(jax.tree.leaves(found))
            return found
        leaves = validate_batch(self.program, self._batch_shardings, batch)
        if "evaluation" not in self._compiled:
            self._compiled["evaluation"] = self._jitted(evaluation, is_step=False)
        self._settle(metrics := self._compiled["evaluation"](self.state, leaves))
        return jax.tree.unflatten(evaluation.result, metrics)

    def lower(self, platform: str | None = None, *, inputs_only: bool = False) -> Any:
        """The step as JAX lowers it, without running it: `.compile()` gives XLA's program and its memory.

        For a `platform` (`tpu`, `cuda`, `cpu`) the mesh may be one without devices, and every array of the state and
        the batch stays an argument, in their order. With `inputs_only` nothing between is pinned: no step that runs.
        """
        keep_unused = platform is not None
        jitted = self._jitted(self.program.step, is_step=True, keep_unused=keep_unused, inputs_only=inputs_only)
        traced = jitted.trace(*self._arguments())
        return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))

    def compile(self) -> Any:
        """Compile the step that is to run, and return XLA's program: its text, its memory, its cost."""
        self._compiled["step"] = compiled = self.lower().compile()
        return compiled

    def prepare(self, num_steps: int = 1) -> None:
        """Compile what takes so many steps in one call; there need be no state yet."""
        several = num_steps if num_steps > 1 else 0
        self._stepping(several).lower(*self._arguments(several)).compile()

    def save(
        self, directory: str | os.PathLike[str], *, data: Batches | None = None, keep: int | None = None
    ) -> checkpoint.Pending:
        """Save the state, with the plan and the data position beside it, as step `num_steps` of a folder.

        Returns as soon as the arrays are copied; the next step may run at once. `wait()` on what is returned
        says that all is on disk.

        Args:
          directory: the folder of all steps.
          data: the batches this run reads, to go on from the same example.
          keep: how many of the newest steps to keep; all by default.

        Raises:
          WriteError: the folder cannot be written.
        """
        self._note(self.num_steps)
        position, history = None if data is None else data.state(), self.history.record() if self.guard else None
        plan, meta = self.plan.to_json(), meta_of(self.program, position, history)
        return checkpoint.save(directory, self.num_steps, self.arrays(), plan_json=plan, meta=meta, keep=keep)

    def model(self) -> nnx.Module:
        """The NNX model with the values of now, for evaluation and export; the run does not see changes to it."""
        return self.program.variables.merge([array.copy() for array in self._in_order()])[0]

    def params(self) -> dict[str, jax.Array]:
        """The parameters by path, as they lie on the devices; the next step takes them away (donation)."""
        return self.arrays("param")

    def arrays(self, kind: str | None = None) -> dict[str, jax.Array]:
        """The state by path: all of it, or one kind (`param`, `optimizer`, `other`)."""
        pairs = zip(self.program.leaves, self._in_order(), strict=True)
        return {leaf.path: array for leaf, array in pairs if kind in (None, leaf.kind)}

    def _in_order(self) -> list[Any]:
        """The state with the layers of stacked arrays in their order; a pipeline may keep them in another."""
        return self.state if self._rows is None else self._rows.to_layers(self.state)

    @cached_property
    def _rows(self) -> LayerOrder | None:
        return layer_order(self.program, self.plan)

    @cached_property
    def _guarded(self) -> GuardedStep | None:
        return GuardedStep.of(self.guard, self.program, self._rows)

    def _limits(self, num_steps: int = 1) -> tuple[np.ndarray, ...]:
        """What the next steps must keep below, for a step that looks itself."""
        # What the call before returned may still be under way: LATE steps, where a call is one step.
        self._note(self.num_steps + 1 - max(LATE, self._num_last + 1))
        guard, guarded = self.guard, self._guarded
        if guard is None or guarded is None:
            return ()
        if max(num_steps, self._num_last) > 1:
            return (np.full(len(guarded.watched), np.inf, np.float32),)  # whoever judges holds it to the limits
        limits = [guard.limit(self.history, self.num_steps + 1, name) for name in guarded.watched]
        return (np.array(limits, np.float32),)

    def _moved_on(self, num_steps: int, metrics: list[Any]) -> dict[str, Any]:
        """Count steps that were taken in one call, and name what they returned."""
        self.num_steps, self._num_last = self.num_steps + num_steps, num_steps
        self._settle(metrics)
        num_results = self.program.step.num_results
        found: dict[str, Any] = jax.tree.unflatten(self.program.step.result, metrics[:num_results])
        if len(metrics) > num_results:
            found[STEP_OK] = metrics[num_results]
        self._first_step.take(self.program, self.num_steps - num_steps + 1, found, self.warn)
        return found

    def _note(self, step: int) -> None:
        """Bring the history up to a step; the values of the last one may have to be waited for."""
        while self.guard is not None and self._returned and self._returned[0][0] <= step:
            number, at, metrics = self._returned.popleft()
            values = {name: np.asarray(metrics[name])[at].tolist() for name in (*WATCHED, STEP_OK) if name in metrics}
            self.history = self.guard.seen(self.history, number, values)

    @property
    def is_simulated(self) -> bool:
        """Whether the mesh is several devices on one CPU; then every step is waited for."""
        return self.mesh.size > 1 and platform_of(self.mesh) == "cpu"

    def _settle(self, metrics: list[Any]) -> None:
        # XLA's CPU collectives deadlock and abort when steps on simulated devices pile up: `CPU_COLLECTIVES`.
        if self.is_simulated:
            jax.block_until_ready(metrics)

    @cached_property
    def _batch_shardings(self) -> list[jax.sharding.NamedSharding]:
        return [placement.sharding(self.mesh) for placement in self.plan.batch]

    def _stepping(self, several: int = 0) -> Any:
        """What takes a step or, of a list of so many batches, `several`; in a group it is compiled here."""
        name = f"{several} steps" if several else "step"
        if name not in self._compiled:
            jitted = self._jitted(self.program.step, is_step=True, several_steps=several)
            self._compiled[name] = compiled_with_barrier(jitted, self._arguments(several), platform_of(self.mesh))
        return self._compiled[name]

    def _arguments(self, several: int = 0) -> tuple[Any, ...]:
        """What it is called with, without numbers."""
        state = abstract_arrays(self.program.leaves, self.plan.leaves, self.mesh)
        if self._rows is not None:
            pairs = zip(state, self._rows.shapes, strict=True)
            state = [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding) for leaf, shape in pairs]
        batch: list[Any] = abstract_arrays(self.program.batch, self.plan.batch, self.mesh)
        return state, [batch] * several or batch, *self._limits(max(1, several))

    def _jitted(
        self,
        traced: StepAnalysis,
        *,
        is_step: bool,
        keep_unused: bool = False,
        inputs_only: bool = False,
        several_steps: int = 0,
    ) -> Any:
        num_leaves, rows = len(self.program.leaves), self._rows
        padded = (
            PaddedStep(traced, self.program.resized(rows.shapes), rows) if is_step and rows and rows.is_padded else None
        )
        replay = sharded_function(
            self.program, self.plan, self.mesh, rows, traced, padded, is_step=is_step, inputs_only=inputs_only
        )
        function = partial(replay.body, replay.graph.body)
        dim_of = padded.dim if padded else partial(rows.dim, traced) if rows else lambda value: None
        guarded = self._guarded if is_step else None

        def step(state: Sequence[Any], batch: Sequence[Any], *limits: Any) -> tuple[list[Any], list[Any]]:
            outputs = function([*state, *batch])
            if rows is not None:
                results = zip(outputs[num_leaves:], traced.graph.body.outputs[num_leaves:], strict=True)
                outputs[num_leaves:] = [rows.to_layers_along(array, dim_of(value)) for array, value in results]
            after, metrics = outputs[:num_leaves], outputs[num_leaves:]
            return (after, metrics) if guarded is None else guarded.finish(state, after, metrics, *limits)

        def evaluate(state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            state = state if rows is None else rows.to_layers(state)
            return function([*state, *batch])

        state = [placement.sharding(self.mesh) for placement in self.plan.leaves]
        batch = self._batch_shardings
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        metrics = [whole] * (traced.num_results + bool(guarded))
        if not is_step:
            return jax.jit(evaluate, in_shardings=(state, batch), out_shardings=metrics)
        platform = platform_of(self.mesh)
        # All of the state is pinned: left open, XLA moves a replicated bias after the first step and compiles again.
        return jax.jit(
            multi_step(step, state, batch) if several_steps else step,
            in_shardings=(state, [batch] * several_steps or batch, *([whole] if guarded else [])),
            out_shardings=(state, metrics),
            donate_argnums=0,
            keep_unused=keep_unused,
            compiler_options=for_platform(self.plan.xla_flags, platform) if platform else None,
        )


@outside_meshes
def start(
    program: Program,
    plan: Plan,
    *,
    seed: int = 0,
    devices: Sequence[Any] | None = None,
    guard: Guard | None = None,
    init: str | os.PathLike[str] | None = None,
    partial: bool = False,
) -> Run:
    """Bring a program to life as planned: every array is made on the devices that keep it.

    Args:
      program: what `spanax.trace` returned.
      plan: what `spanax.plan` returned for it.
      seed: the numbers `nnx.Rngs` starts from; they are the same on every mesh.
      devices: the devices to use; all of this process by default.
      guard: what makes a step bad, and what follows; nothing by default.
      init: a run folder, or a folder of checkpoints, that parameters and statistics begin from; the optimizer, the
        step count and random state are new.
      partial: load the weights of `init` that match by path and shape, for a model that has more (LoRA adapters, a new
        head); `run.loaded` lists what was loaded, missing and unexpected.

    Raises:
      DataError: `init` holds no good checkpoint, or one of another model.
      HostsError: this process is one of a group (docs/hosts.md), and cannot join it.
      SpanaxError: the plan is another program's, or there are too few devices.

    Example:
      >>> import optax, spanax
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> run = start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="tensor"), seed=1)
      >>> tuple(run.params()["kernel"].sharding.spec)
      (None, 'model')
    """
    if partial and init is None:
        raise SpanaxError("`partial` needs `init`, the weights to begin from.", fix="init='runs/base', partial=True")
    program = as_planned(program, plan).with_seed(seed)
    mesh = build_mesh(plan, devices)
    rows = layer_order(program, plan)
    places = plan.leaves if rows is None else rows.layer_placements
    given, loaded = ({}, None) if init is None else load(program, places, mesh, init, partial=partial)
    state = init_sharded_state(program, places, mesh, seed, given)
    state = state if rows is None else rows.to_rows(state)
    assert_placed(plan, state, mesh)
    return Run(program, plan, mesh, state, guard=guard, loaded=loaded)
