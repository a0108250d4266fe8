"""The user's definition of a train step, from which each variant of a program is traced once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import jax
from flax import nnx

from spanax.batch_dims import ExampleDims, num_examples
from spanax.compat import unsharded_tracers
from spanax.displays import doing
from spanax.errors import LossError, PipelineError, SpanaxError, StepError, VariantError
from spanax.trace.analysis.computation import Computation
from spanax.trace.axes.axes import Traced, aligned, discover, named_like, warn_of_unknown
from spanax.trace.axes.retrace import Shapes, batch_sized_dims, matching, retraced_graph
from spanax.trace.initial_state import Eager, Initial, initial
from spanax.trace.jaxpr.graph import Graph, contains, remat_of
from spanax.trace.jaxpr.permutations import step_graph
from spanax.trace.jaxpr.remat_policies import GATHERED
from spanax.trace.loss import as_metrics, chosen_step, dtype_error, fusing_step, losses_of, traced_update
from spanax.trace.optimizers.wrapped import injected_rate, observing, of_loss, recording, with_logged
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.chunked_loss import chunked_loss
from spanax.trace.rewrites.microbatches.accumulation import Microbatches, microbatches_of
from spanax.trace.rewrites.padding import padded_graph, padded_step
from spanax.trace.rewrites.pure_loss import numbers_of, with_extra
from spanax.trace.rewrites.traced_once import TracedLoss
from spanax.trace.user_function import UserFunction
from spanax.trace.user_mesh import UserMesh, outside_meshes
from spanax.trace.variables import Leaf, Variables, lowered, plain_variables, wants_hijax
from spanax.trace.variant import Variant

Results = tuple[list[Any], dict[str, Any]]
"""The new state of a step, and its metrics."""

AS_WRITTEN = Variant()

Function = Callable[[tuple[Any, ...], list[Any]], Any]
"""A function of a tuple of NNX objects, which it may update in place, and of a list of arrays; returns a pytree."""

P = ParamSpec("P")
T = TypeVar("T")


def _once(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Returns the method, run outside the user's mesh, with its result for each arguments stored in the definition."""

    @wraps(method)
    def stored(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        if (key := (method.__name__, *args)) not in self._memo:
            with unsharded_tracers():
                self._memo[key] = outside_meshes(method)(self, *args, **kwargs)
        return cast(T, self._memo[key])

    return stored


@dataclass(frozen=True, eq=False)
class State:
    """The variables of model and optimizer, how they are initialized, and the mesh of their annotations."""

    variables: Variables
    init: Initial | None
    mesh: UserMesh


class TracedVariant(NamedTuple):
    """The traced step of one variant, its fused attentions, and its calls of `value_and_grad`."""

    step: Traced
    attention: tuple[FusedAttention, ...]
    num_losses: int = 0


@dataclass(frozen=True, eq=False)
class Definition:
    """The arguments of `spanax.trace`, with the mesh and the defaults of NNX under which it was called.

    Attributes:
      build: returns the model; `Eager` if it runs on the host.
      optimizer: as in `spanax.trace`.
      batch: shapes and dtypes of the batch.
      batch_leaves: the same as leaves.
      batch_treedef: the structure of the batch.
      loss: as in `spanax.trace`; None with a `train_step`.
      train_step: as in `spanax.trace`; None with a `loss`.
      clip_norm: as in `spanax.trace`.
      accumulate: as in `spanax.trace`.
      batch_axes: the dim with the examples of each array of the batch, if the user says it.
      mesh: the user's mesh, with the shardings of the batch.
      evaluate: as in `spanax.trace`; None for an evaluation of the loss.
      var_defaults: the defaults for new Variables.
    """

    build: Callable[..., nnx.Module] | Eager
    optimizer: Any
    batch: Any
    batch_leaves: tuple[Leaf, ...]
    batch_treedef: Any
    loss: Callable[..., Any] | None
    train_step: Callable[..., Any] | None
    clip_norm: float | None
    accumulate: str
    mesh: UserMesh
    batch_axes: ExampleDims | None = None
    evaluate: Callable[..., Any] | None = None
    var_defaults: Any = field(default_factory=nnx.var_defaults)
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def rewrites_loss(self) -> bool:
        """Whether the program was traced from a loss."""
        return self.loss is not None

    @property
    def has_evaluation(self) -> bool:
        """Whether `evaluation` returns a loss."""
        return self.loss is not None

    def state(self, variant: Variant) -> State:
        """Returns the state of a variant; it depends on the seed and on whether gradients are recorded."""
        return self._state(variant.records_gradients, variant.seed)

    def step(self, variant: Variant, attentions: list[FusedAttention] | None = None) -> Any:
        """Returns the train step of a variant as a function of model, optimizer and batch.

        Args:
          variant: the options of the step.
          attentions: each fused attention is appended to this list when the step is traced.

        Raises:
          SpanaxError: the definition does not support the variant.
        """
        options = self.clip_norm, self.accumulate, variant, attentions, self.batch_axes
        traced = self._traced_loss(variant.dtypes, variant.seed)
        return chosen_step(self.loss, self.train_step, *options, traced)

    @_once
    def traced(self, variant: Variant) -> TracedVariant:
        """Returns the traced step and evaluation of a variant.

        Raises:
          SpanaxError: the step cannot be traced.
        """
        doing(f"tracing the step: {variant}")
        if variant.padded:
            return self._padded(variant)
        state = self.state(variant)
        attentions = list[FusedAttention]()
        try:
            run = partial(_run_step, state.variables, self.step(variant, attentions))
            plain = replace(AS_WRITTEN, records_gradients=variant.records_gradients, seed=variant.seed)
            whole = None if variant.microbatches == 1 else self.traced(plain).step
            step = self._traced(state, run, self.batch_axes, variant.microbatches, whole)
        except SpanaxError:
            raise
        except Exception as error:
            if variant.compute_dtype is None:
                raise
            self.traced(replace(variant, compute_dtype=None))  # raises what the loss raises in every dtype
            raise dtype_error(error, variant.compute_dtype, state.variables.leaves) from error
        warn_of_unknown(step.axes)
        return TracedVariant(step, tuple(dict.fromkeys(attentions)))

    @_once
    def evaluation(self, variant: Variant) -> Traced | None:
        """Returns the traced loss of the model in evaluation mode, with the axes of the step; None without a `loss`.

        Raises:
          SpanaxError: it cannot be traced.
        """
        if self.loss is None:
            return None
        step = self.traced(variant).step
        plain = replace(variant, remat=None, microbatches=1, compute_dtype=None, quantize=None, padded=())
        evaluation = self._evaluation(plain, step.axes.examples)
        if variant.padded:
            leaves = self.state(variant).variables.leaves
            evaluation = padded_step(evaluation, leaves, self.batch_leaves, variant.padded)
        axes = aligned(evaluation.axes, evaluation.graph.body.inputs, step.axes, step.graph.body.inputs)
        return replace(evaluation, axes=axes)

    def _padded(self, variant: Variant) -> TracedVariant:
        """Returns the variant without padding, with its axes padded."""
        plain = self.traced(replace(variant, padded=()))
        leaves = self.state(variant).variables.leaves
        return plain._replace(step=padded_step(plain.step, leaves, self.batch_leaves, variant.padded))

    @_once
    def resized(self, variant: Variant, shapes: Shapes) -> Graph:
        """Returns the graph of a variant's step with other shapes for the leaves of the state.

        Raises:
          SpanaxError: it cannot be traced with these shapes, or its operations differ.
        """
        if variant.padded:
            plain = replace(variant, padded=())
            resized = replace(self.traced(plain).step, graph=self.resized(plain, shapes))
            return matching(self.traced(variant).step.graph, padded_graph(resized, variant.padded))
        state = self.state(variant)
        variables = state.variables.of_shapes(shapes)
        step = state.mesh.traced(partial(_run_step, variables, self.step(variant)))
        return retraced_graph(self.traced(variant).step.graph, step, variables.abstract(), self.batch)

    @_once
    def attentions(self, variant: Variant) -> tuple[FusedAttention, ...]:
        """Returns the fused attentions of a variant, without its gradient.

        Raises:
          SpanaxError: the loss cannot be traced.
        """
        variant = replace(variant, remat=None, microbatches=1, loss_chunks=1)
        state = self.state(variant)
        traced = self._traced_loss(variant.dtypes, variant.seed)
        step = fusing_step(self.loss, variant, traced)
        try:
            with plain_variables():
                run = state.mesh.traced(partial(_run_step, state.variables, step))
                jax.eval_shape(run, state.variables.abstract(), self.batch)
        except Exception:
            return self.traced(variant).attention  # raises the error with its reason
        return tuple(dict.fromkeys(traced.attentions[variant.context]))

    def microbatches(self, variant: Variant) -> Microbatches:
        """Returns whether a variant supports microbatches, and if not, why."""
        return self._microbatches(replace(variant, remat=None, microbatches=1, context=GATHERED, loss_chunks=1))

    @_once
    def computation(self) -> Computation:
        """Returns the fingerprint of the step as written; the first call may trace it."""
        variant = Variant()
        return Computation.of(self.traced(variant).step, self.state(variant).variables.leaves)

    def run_loss(self, variant: Variant) -> Callable[[list[Any], Any], Results] | None:
        """Returns the loss as a function of state and batch of any size; None without a `loss`."""
        state = self.state(variant)
        return None if self.loss is None else state.mesh.traced(partial(_run_loss, state.variables, self.loss))

    def run_evaluate(self, variant: Variant) -> Callable[[list[Any], Any], Results] | None:
        """Returns the user's `evaluate` as a function of state and batch of any size; None if there is none."""
        state = self.state(variant)
        return self.evaluate and state.mesh.traced(partial(_run_evaluate, state.variables, self.evaluate))

    @_once
    def check_evaluate(self, variant: Variant) -> None:
        """Traces the user's `evaluate`, so that an error in it is raised before training.

        Raises:
          SpanaxError: it does not return a dict of numbers and arrays.
        """
        state = self.state(variant)
        if self.evaluate is not None:
            run = partial(_run_evaluate, state.variables, self.evaluate)
            with plain_variables():
                self._user(self.evaluate, state).jaxpr(run, state.variables.abstract(), self.batch, state.mesh)

    @_once
    def _state(self, records_gradients: bool, seed: int) -> State:
        build = replace(self.build, seed=seed) if isinstance(self.build, Eager) else self.build
        optimizer = recording(self.optimizer, self._updated()) if records_gradients else self.optimizer
        with nnx.var_defaults(hijax=self.var_defaults.hijax, ref=self.var_defaults.ref):
            variables, init = initial(build, optimizer if self.loss is None else of_loss(optimizer), self.mesh)
            # A user's step may write to hijax Variables inside `jax.grad`; Spanax's step around a loss does not.
            variables = replace(variables, is_hijax=self.loss is None and wants_hijax())
        return State(variables, init, self.mesh.with_state(variables.leaves))

    def _updated(self) -> Any:
        """Returns the shapes of the parameters that a train step of the user updates; None without one."""
        if self.train_step is None:
            return None
        state = self._state(False, 0)
        params = list[Any]()
        step = state.mesh.traced(partial(_run_step, state.variables, observing(self.step(Variant()), params)))
        with plain_variables():
            jax.eval_shape(step, state.variables.abstract(), self.batch)
        return params[-1] if params else None

    @_once
    def _evaluation(self, variant: Variant, examples: ExampleDims) -> Traced:
        state = self.state(variant)
        run_loss = partial(_run_loss, state.variables, self.loss)
        attending = run_loss if variant.context == GATHERED else fuse_attention(run_loss, variant.context, num_states=1)
        return self._traced(state, chunked_loss(attending, variant.loss_chunks), examples)

    @_once
    def _traced_loss(self, dtypes: tuple[str | None, ...], seed: int) -> TracedLoss:
        return TracedLoss(update=self._update())

    @_once
    def _update(self) -> Callable[..., Any]:
        return traced_update()

    @_once
    def _microbatches(self, variant: Variant) -> Microbatches:
        state = self.state(variant)

        def shapes(step: Any) -> Any:
            run = state.mesh.traced(partial(_run_step, state.variables, step))
            with plain_variables():
                return jax.eval_shape(run, state.variables.abstract(), self.batch)

        options = self.accumulate, shapes, self.batch_axes, self._traced_loss(variant.dtypes, variant.seed)
        return microbatches_of(self.loss, variant.dtypes, *options)

    def _traced(self, state: State, function: Callable[..., Results], *options: Any) -> Traced:
        user = self._user(self.loss or self.train_step, state)
        traced = traced_function(state, function, self.batch, self.batch_leaves, user, *options)
        num_state = len(traced.graph.body.outputs) - traced.result.num_leaves
        graph, result = with_logged(traced.graph, num_state, traced.result)
        return replace(traced, graph=graph, result=result)

    def _user(self, function: Any, state: State) -> UserFunction:
        prefix = "" if jax.tree_util.all_leaves([self.batch]) else "batch."
        batch = [prefix + leaf.path for leaf in self.batch_leaves]
        return UserFunction(function, (*state.variables.names, *batch))


@dataclass(frozen=True, eq=False)
class FunctionDefinition:
    """What `trace_function` traces.

    Attributes:
      user: the function.
      values: the structure of the objects.
      batch: shapes and dtypes of the arrays.
      batch_leaves: the same as leaves.
      batch_axes: the dim with the examples of each array, if the user says it.
    """

    user: UserFunction
    values: State
    batch: list[jax.ShapeDtypeStruct]
    batch_leaves: tuple[Leaf, ...]
    batch_axes: ExampleDims | None = None
    _memo: dict[Any, TracedVariant] = field(default_factory=dict, repr=False)

    @property
    def batch_treedef(self) -> Any:
        """Returns the structure of the arrays, a list."""
        return jax.tree.structure(self.batch)

    def state(self, variant: Variant) -> State:
        """Returns the structure of the objects."""
        return self.values

    @_once
    def traced(self, variant: Variant) -> TracedVariant:
        """Returns the traced function.

        Raises:
          SpanaxError: it cannot be traced, or the variant requires a loss and the function has none.
        """
        if variant.padded:
            plain = self.traced(replace(variant, padded=()))
            step = padded_step(plain.step, self.values.variables.leaves, self.batch_leaves, variant.padded)
            return plain._replace(step=step)
        run = partial(_run_function, self.values.variables, self.user.function)
        whole = None if variant.microbatches == 1 else self.traced(AS_WRITTEN).step
        options = self.user, self.batch_axes, variant.microbatches, whole
        with losses_of(variant) as losses:
            step = traced_function(self.values, run, self.batch, self.batch_leaves, *options)
        if replace(variant, seed=0) != AS_WRITTEN and not losses.num_losses:
            raise VariantError(
                "remat, microbatches, attention and loss chunks apply to a loss, and the function has none.",
                fix="spanax.value_and_grad(loss) instead of nnx.value_and_grad(loss) in the function",
            )
        warn_of_unknown(step.axes)
        return TracedVariant(step, tuple(dict.fromkeys(losses.attentions)), losses.num_losses)

    @property
    def has_evaluation(self) -> bool:
        """Returns False: a function has no evaluation mode."""
        return False

    @property
    def rewrites_loss(self) -> bool:
        """Whether the function computes a loss by `spanax.value_and_grad`."""
        return any(traced.num_losses for traced in self._memo.values())

    def attentions(self, variant: Variant) -> tuple[FusedAttention, ...]:
        """Returns the fused attentions of a variant."""
        return self.traced(variant).attention

    def microbatches(self, variant: Variant) -> Microbatches:
        """Returns whether the losses of the function support microbatches."""
        size = num_examples([leaf.shape for leaf in self.batch_leaves], self.traced(AS_WRITTEN).step.axes.examples)
        count = next((count for count in range(2, size + 1) if size % count == 0), None)
        if not self.rewrites_loss or count is None:
            what = "the function does not run in microbatches."
            return Microbatches(error=VariantError(what, fix="spanax.value_and_grad(loss) in it"))
        try:
            self.traced(replace(variant, microbatches=count))
        except SpanaxError as error:
            return Microbatches(error=error)
        return Microbatches()

    def computation(self) -> Computation:
        """Returns the fingerprint of the function."""
        return Computation.of(self.traced(AS_WRITTEN).step, self.values.variables.leaves)

    def evaluation(self, variant: Variant) -> None:
        """Returns None: a function has no evaluation mode."""

    def run_loss(self, variant: Variant) -> None:
        """Returns None: a function has no evaluation mode."""

    def run_evaluate(self, variant: Variant) -> None:
        """Returns None: a function has no evaluation mode."""

    def resized(self, variant: Variant, shapes: Shapes) -> Graph:
        """Raises: only a pipeline traces a step with other shapes, and it requires a loss."""
        raise PipelineError("a pipeline requires a loss.", fix="spanax.trace(loss=...), or a mesh without 'pipe'")


ProgramDefinition = Definition | FunctionDefinition
"""What a program is traced from: a train step and a function that creates its state, or a function of objects."""


def traced_function(
    state: State,
    function: Callable[..., Any],
    batch: Any,
    batch_leaves: Sequence[Leaf],
    user: UserFunction,
    examples: ExampleDims | None,
    microbatches: int = 1,
    whole: Traced | None = None,
) -> Traced:
    """Returns the traced function, with its axes.

    Args:
      state: the structure of the function's first argument.
      function: a function from the values of the state and a batch to the new values and a pytree of results.
      batch: shapes and dtypes of the batch.
      batch_leaves: the same as leaves.
      user: the function that it calls.
      examples: the dim with the examples of each array of the batch; None: as the function uses them.
      microbatches: the number of parts in which it computes the batch.
      whole: the function in one part. Its axes get the same names, which a part of one example does not show.

    Raises:
      SpanaxError: the function uses a traced array that NNX does not track.
    """
    leaves = state.variables.leaves
    values = state.variables.abstract()
    with plain_variables():  # Variables created in the step have the same type as those of the model
        jaxpr, (_, result) = user.jaxpr(function, values, batch, state.mesh)
    graph = step_graph(jaxpr)
    if any(isinstance(value, jax.core.Tracer) for value in graph.constants.values()):
        raise StepError(
            "the train step uses an array that `build` created and NNX does not track, in a closure or a global.",
            fix="self.name = array in a module, or eager_build=True",
        )
    axes = discover(graph, leaves, batch_leaves, examples=whole.axes.examples if whole else examples)
    if batch_dims := batch_sized_dims(graph, axes, state.mesh.traced(function), values, batch, microbatches):
        axes = discover(graph, leaves, batch_leaves, batch_dims, axes.examples)
    if whole is not None:
        axes = named_like(axes, graph.body.inputs, whole.axes, whole.graph.body.inputs)
    has_remat = any(remat_of(eqn) or contains(eqn, remat_of) for eqn in jaxpr.eqns)
    return Traced(graph, axes, jax.tree.structure(result), has_remat)


def _run_step(variables: Variables, step: Any, values: list[Any], batch: Any) -> Results:
    def run(values: list[Any], batch: Any) -> Results:
        with nnx.var_defaults(hijax=variables.is_hijax):
            model, optimizer = variables.merge(values)
            metrics = as_metrics(step(model, optimizer, batch))
            nnx.pop(model, nnx.Intermediate)  # values of `sow` are not state
            after = variables.split(model, optimizer)
        return after, injected_rate(variables.leaves, after) | metrics

    return (lowered(run) if variables.is_hijax else run)(values, batch)


def _run_loss(variables: Variables, loss: Any, values: list[Any], batch: Any) -> Results:
    model, _ = variables.merge(values)
    model.eval()
    scalar, extra = with_extra(loss(model, batch))
    return [], {"loss": scalar} | extra


def _run_evaluate(variables: Variables, evaluate: Any, values: list[Any], batch: Any) -> Results:
    model, _ = variables.merge(values)
    model.eval()
    metrics = evaluate(model, batch)
    if not isinstance(metrics, Mapping):
        raise LossError(
            f"`evaluate` returned a {type(metrics).__name__}, not a dict of metrics.", fix="return {'name': metric}"
        )
    return [], numbers_of("evaluate", metrics)


def _run_function(
    variables: Variables, function: Function, values: list[Any], arrays: list[Any]
) -> tuple[list[Any], Any]:
    nodes = variables.merge(values)
    result = function(nodes, arrays)
    return variables.split(*nodes, by="the function"), result
