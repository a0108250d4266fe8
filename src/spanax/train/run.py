"""Runs a program on devices as its plan specifies: its sharded state, and its compiled step."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx

from spanax.errors import LossError
from spanax.plan.plan import Plan
from spanax.processes.compile_barrier import compiled_with_barrier
from spanax.processes.process_batches import global_batch
from spanax.step.compiled_function import compile_notice
from spanax.step.donation import check_state, note_failure
from spanax.step.guard import LATE, STEP_OK, Guard, History, check_steps_per_call
from spanax.step.guarded_step import invalid_leaves
from spanax.step.placement import platform_of, to_device, validate_batch
from spanax.step.replay.callbacks import raise_deferred
from spanax.step.train_step import EvalStep, TrainStep
from spanax.trace.analysis.training_signal import CERTAIN, Flaw, flaws
from spanax.trace.optimizers.wrapped import averages
from spanax.trace.program import Program
from spanax.trace.user_mesh import methods_outside_meshes
from spanax.train.data.batches import Batches
from spanax.train.evaluation import num_fewer, smaller_evaluation, unplanned_evaluation
from spanax.train.program_digest import meta_of
from spanax.train.store import checkpoint
from spanax.train.store.loaded import Loaded

GRAD_NORM = "grad_norm"


def warn_user(line: str) -> None:
    """Issues a Python warning at the line that called `run.step`."""
    warnings.warn(line, stacklevel=6)


@dataclass(eq=False)
class FirstStep:
    """Warns after the first step of a run about flaws of its program and about a gradient of zero."""

    _is_over: bool = False
    _norm: Any = None
    _step: int = 0

    def take(self, program: Program, step: int, metrics: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        """Checks the metrics of the first step as soon as they are computed; called after each step."""
        if self._is_over:
            return
        if self._norm is None:
            problems = flaws(program.step, program.leaves, has_loss=program.has_evaluation)
            for problem in problems:
                if problem.flaw in CERTAIN:
                    warn(f"{problem.message} {problem.fix}")
            self._norm = metrics.get(GRAD_NORM)
            self._step = step
            is_known = any(problem.flaw is Flaw.NO_GRADIENT for problem in problems)
            self._is_over = is_known or not isinstance(self._norm, jax.Array)
        if not self._is_over and self._norm.is_ready():
            self._is_over = True
            if np.asarray(self._norm).flat[0] == 0:
                warn(
                    f"the gradient norm of step {self._step} is 0, so no parameter is trained. Check the loss for dead "
                    "units, masks that are all zero, and weights that are zero."
                )


@methods_outside_meshes
@dataclass(eq=False)
class Run:
    """The sharded state of a program and its compiled train step.

    Attributes:
      program: the traced train step.
      plan: the shardings of the state, the batch and the intermediate values.
      mesh: the devices.
      state: the leaves of the state, in the order of `program.leaves`.
      num_steps: the number of steps taken since initialization, including those before a restart.
      position: the position in the data that a restored state was saved with.
      guard: decides which steps are bad.
      history: metrics of recent good steps, for the guard.
      loaded: the weights loaded by `init`.
      warn: called with each warning.
      measures_load: whether a step returns the load of its experts, too.

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
    measures_load: bool = field(default=False, repr=False)
    _first_step: FirstStep = field(default_factory=FirstStep, repr=False)
    _steps: dict[int, Any] = field(default_factory=dict, repr=False)
    _evaluations: dict[int, Any] = field(default_factory=dict, repr=False)
    _returned: deque[tuple[int, Any, dict[str, Any]]] = field(default_factory=deque, repr=False)
    _num_last: int = field(default=1, repr=False)

    def step(self, batch: Any) -> dict[str, Any]:
        """Takes one train step: updates the state and returns the metrics as arrays.

        In a group of processes a batch of NumPy arrays is the global batch, equal on every process;
        `spanax.local_batch` concatenates the rows of each process. With a guard of policy `skip`, a bad step is counted
        but leaves the state unchanged; its `step_ok` is False.

        Raises:
          SpanaxError: the batch differs in structure, shape or dtype from the traced one, or between processes.
        """
        return self._take(self._validated(batch))

    def steps(self, batches: Sequence[Any]) -> dict[str, Any]:
        """Takes several train steps in one dispatch, for steps that are shorter than the dispatch overhead of the host.

        Returns the metrics of `step`, stacked along dim 0, with the same values up to the rounding of a compiled
        loop. Each number of batches compiles once.

        Raises:
          SpanaxError: there is no batch, a batch differs from the traced one, or the guard's limits change each step.

        Example:
          >>> import optax, spanax
          >>> build, loss = lambda rngs: nnx.Linear(4, 8, rngs=rngs), lambda model, x: (model(x) ** 2).mean()
          >>> batch = np.ones((8, 4), "float32")
          >>> program = spanax.trace(build=build, optimizer=optax.sgd(0.1), batch=batch, loss=loss)
          >>> run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
          >>> run.steps([batch] * 4)["loss"].shape, run.num_steps
          ((4,), 4)
        """
        check_steps_per_call(self.guard, len(batches))
        leaves = [self._validated(batch) for batch in batches]
        return self._take(leaves, several=len(batches))

    def judge(self, step: int, values: Mapping[str, Any]) -> str | None:
        """Returns why a step is bad, given its metrics as Python numbers; None if it is good."""
        if self.guard is None:
            return None
        self._note(step - 1)
        return self.guard.reason(self.history, step, values)

    def unsound(self) -> list[str]:
        """Returns the paths of non-finite parameters and of other leaves that contain a NaN."""
        are_invalid = np.asarray(self._find_invalid(self.state))
        return [leaf.path for leaf, is_invalid in zip(self.program.leaves, are_invalid, strict=True) if is_invalid]

    @cached_property
    def _find_invalid(self) -> Any:
        replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        shardings = [array.sharding for array in self.state]

        def function(state: Sequence[Any]) -> Any:
            return invalid_leaves(self.program, self._train.rows, to_device(state, shardings))

        return jax.jit(function, out_shardings=replicated)

    def go_back(self, begin: Callable[[], "Run"]) -> None:
        """Replaces the state, the step and the history with those of the run that `begin` returns.

        The state is deleted before `begin` is called. Compiled functions are reused.
        """
        for array in self.state:
            array.delete()  # the devices may not have memory for two states
        other = begin()
        self.state = other.state
        self.num_steps = other.num_steps
        self.position = other.position
        self.history = other.history
        self.loaded = other.loaded
        self._returned.clear()

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Returns the metrics of `evaluate`, or the loss and its metrics, on a batch in evaluation mode.

        They are those of the averaged parameters, if `spanax train --ema` averages them. The state does not change. A
        batch may have fewer examples than the traced one, such as the last one of a dataset. Each size compiles once.

        Raises:
          SpanaxError: the program was traced from a train step only, or the batch differs from the traced one.
        """
        evaluation = self.program.evaluation
        is_users = self.program.run_evaluate is not None
        if evaluation is None and not is_users:
            raise LossError(
                "this program has no evaluation: it was traced from a train_step.",
                fix="trace it with loss=... or evaluate=..., or evaluate run.model() yourself",
            )
        step = self._evaluation
        if count := num_fewer(self.program, batch):
            if count not in self._evaluations:
                smaller = smaller_evaluation(self.program, self.plan, self.mesh, step.rows, count)
                self._evaluations[count] = smaller
            named: dict[str, Any] = self._evaluations[count](self._averaged(), batch)
            self._settle(jax.tree.leaves(named))
            return named
        leaves = self._validated(batch)
        if 0 not in self._evaluations:
            jitted = (
                step.jitted(evaluation)
                if evaluation is not None and not is_users
                else unplanned_evaluation(self.program, self.plan, self.mesh, step.rows, step.batch)
            )
            self._evaluations[0] = self._compiling("evaluate", jitted, step.abstract)
        metrics = self._evaluations[0](self._averaged(), leaves)
        self._settle(jax.tree.leaves(metrics))
        return metrics if evaluation is None or is_users else jax.tree.unflatten(evaluation.result, metrics)

    def lower(self, platform: str | None = None, *, inputs_only: bool = False) -> Any:
        """Returns the lowered step; its `.compile()` has XLA's program and memory analysis.

        Args:
          platform: `tpu`, `cuda` or `cpu` to lower for a mesh that may be abstract, keeping unused arguments; None for
            the platform of the mesh.
          inputs_only: constrain only the shardings of inputs and outputs; for analysis, not for training.
        """
        step = replace(self._train, inputs_only=True) if inputs_only else self._train
        traced = step.jitted(keep_unused=platform is not None).trace(*self._arguments())
        return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))

    def compile(self) -> Any:
        """Compiles the step that `step` will call, and returns the compiled program."""
        with compile_notice("the step", self.plan):
            self._steps[0] = compiled = self.lower().compile()
        return compiled

    def prepare(self, num_steps: int = 1) -> None:
        """Compiles the function that takes `num_steps` steps in one call; works before the state is initialized."""
        several = num_steps if num_steps > 1 else 0
        stepping = self._stepping(several)
        if jax.process_count() == 1:  # several processes compile together: `compiled_with_barrier`
            with compile_notice("the step", self.plan):
                stepping.lower(*self._arguments(several)).compile()

    def save(
        self, directory: str | os.PathLike[str], *, data: Batches | None = None, keep: int | None = None
    ) -> checkpoint.Pending:
        """Saves the state, the plan and the data position as checkpoint `num_steps` of a directory.

        Returns as soon as the arrays are copied, so that the next step may run; call `wait()` on the result to wait
        until the checkpoint is on disk.

        Args:
          directory: the directory of all checkpoints.
          data: the batches that this run reads, to resume from the same example.
          keep: the number of newest checkpoints to keep; all by default.

        Raises:
          WriteError: the folder cannot be written.
        """
        self._note(self.num_steps)
        position = None if data is None else data.state()
        history = self.history.record() if self.guard else None
        plan = self.plan.to_json()
        meta = meta_of(self.program, position, history)
        return checkpoint.save(directory, self.num_steps, self.arrays(), plan_json=plan, meta=meta, keep=keep)

    def model(self) -> nnx.Module:
        """Returns a copy of the NNX model with the current values, for evaluation and export."""
        return self.program.variables.merge([array.copy() for array in self._in_order()])[0]

    def params(self) -> dict[str, jax.Array]:
        """Returns the sharded parameters by path; the next step donates, and so deletes, them."""
        return self.arrays("param")

    def arrays(self, kind: str | None = None) -> dict[str, jax.Array]:
        """Returns the state by path: all of it, or one kind (`param`, `optimizer`, `other`)."""
        pairs = zip(self.program.leaves, self._in_order(), strict=True)
        return {leaf.path: array for leaf, array in pairs if kind in (None, leaf.kind)}

    @cached_property
    def _averages(self) -> dict[int, int]:
        return averages(self.program.leaves)

    def _averaged(self) -> list[jax.Array]:
        """Returns the state, with the average of each parameter that the optimizer averages in its place."""
        state = list(self.state)
        for param, average in self._averages.items():
            value = jax.device_put(self.state[average], self.state[param].sharding)
            state[param] = value.astype(self.state[param].dtype)
        return state

    def _validated(self, batch: Any) -> list[Any]:
        """Returns the leaves of a batch, as the compiled functions accept them; the state must not be lost."""
        check_state(self.program.leaves, self.state)
        leaves = validate_batch(self.program, self._train.batch, batch)
        return global_batch(leaves, self._train.batch, [leaf.path for leaf in self.program.batch])

    def _in_order(self) -> list[Any]:
        """Returns the state with stacked layers in model order; a pipeline may store them in another order."""
        check_state(self.program.leaves, self.state)
        return self.state if self._train.rows is None else self._train.rows.to_layers(self.state)

    def _limits(self, num_steps: int = 1) -> tuple[np.ndarray, ...]:
        """Returns the limits on the metrics of the next steps, for a step that checks them on the devices."""
        # The metrics of the previous call may not be ready: LATE steps, if each call is one step.
        self._note(self.num_steps + 1 - max(LATE, self._num_last + 1))
        guard = self.guard
        guarded = self._train.guarded
        if guard is None or guarded is None:
            return ()
        if max(num_steps, self._num_last) > 1:
            return (np.full(len(guarded.watched), np.inf, np.float32),)  # `judge` applies the limits
        limits = [guard.limit(self.history, self.num_steps + 1, name) for name in guarded.watched]
        return (np.array(limits, np.float32),)

    def _take(self, leaves: list[Any], several: int = 0) -> dict[str, Any]:
        """Takes one step, or `several` on a list of batches, and returns the metrics by name."""
        first = self.num_steps + 1
        num_steps = several or 1
        limits = self._limits(num_steps)
        with nullcontext() if self._steps else compile_notice("the step", self.plan):
            self.state, metrics = self._stepping(several)(self.state, leaves, *limits)
        self.num_steps, self._num_last = self.num_steps + num_steps, num_steps
        try:
            self._settle(metrics)
        except Exception as error:
            note_failure(error)
            for array in self.state:  # computed without the result of a callback
                array.delete()
            raise
        num_results = self.program.step.num_results
        named: dict[str, Any] = jax.tree.unflatten(self.program.step.result, metrics[:num_results])
        named |= zip(self._train.added, metrics[num_results:], strict=True)
        if self.guard is not None:
            self._returned.extend((first + index, index if several else (), named) for index in range(num_steps))
        self._first_step.take(self.program, first, named, self.warn)
        return named

    def _note(self, step: int) -> None:
        """Adds the metrics of steps up to `step` to the history; may block until they are computed."""
        while self.guard is not None and self._returned and self._returned[0][0] <= step:
            number, index, metrics = self._returned.popleft()
            names = [name for name in (*self.guard.metrics, STEP_OK) if name in metrics]
            values = {name: np.asarray(metrics[name])[index].tolist() for name in names}
            self.history = self.guard.seen(self.history, number, values)

    @property
    def is_simulated(self) -> bool:
        """Whether the mesh has several devices on CPUs; each step then blocks until it is computed."""
        return self._train.is_simulated

    def _settle(self, metrics: list[Any]) -> None:
        # XLA's CPU collectives deadlock and abort when steps on simulated devices pile up: `CPU_COLLECTIVES`.
        if self.is_simulated:
            jax.block_until_ready(metrics)
            raise_deferred()

    @cached_property
    def _train(self) -> TrainStep:
        return TrainStep(self.program, self.plan, self.mesh, self.guard, measures_load=self.measures_load)

    @cached_property
    def _evaluation(self) -> EvalStep:
        return EvalStep(self.program, self.plan, self.mesh)

    def _stepping(self, several: int = 0) -> Any:
        """Returns the jitted function for one step, or for `several` steps on a list of batches.

        In a group of processes it is compiled here, after a barrier.
        """
        if several not in self._steps:
            jitted = self._train.jitted_loop(several) if several else self._train.jitted()
            name = f"{several} steps" if several else "step"
            self._steps[several] = self._compiling(name, jitted, self._arguments(several))
        return self._steps[several]

    def _compiling(self, name: str, jitted: Any, arguments: Sequence[Any]) -> Any:
        with compile_notice(f"`{name}`", self.plan):
            return compiled_with_barrier(jitted, arguments, platform_of(self.mesh), name, self.program.batch)

    def _arguments(self, several: int = 0) -> tuple[Any, ...]:
        """Returns the abstract arguments of the function that `_stepping` returns."""
        state, batch = self._train.abstract
        return state, [batch] * several or batch, *self._limits(max(1, several))
