"""Optimizers: their validation, and wrappers that record gradients, log schedules and store narrow moments."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.errors import OptimizerError
from spanax.trace.jaxpr.graph import METRIC, Graph, marked
from spanax.trace.optimizers.recipe import AVERAGED
from spanax.trace.variables import Leaf, optimizer_of

PREFIX = "optimizer.opt_state.0.gradients."
"""The path prefix of a recorded gradient; the path of its parameter follows."""


class RecordedGradients(NamedTuple):
    """The state of the gradient transformation that records the gradients."""

    gradients: Any


def recording(optimizer: Any, updated: Any = None) -> Callable[[nnx.Module], nnx.Optimizer]:
    """Returns the optimizer with the gradients of the last step as an additional part of its state.

    Gradients are recorded after clipping by the train step, and before the optimizer's transformations.

    Args:
      optimizer: an optimizer, as `spanax.trace` accepts it.
      updated: shapes of the parameters that the step passes to an `nnx.Optimizer` of the user, as `observing` appends
        them; by default, those of the model.

    Example:
      >>> optimizer = recording(optax.sgd(0.1))(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> sorted(optimizer.opt_state[0].gradients)
      ['bias', 'kernel']
    """

    def init(params: Any) -> RecordedGradients:
        return RecordedGradients(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: RecordedGradients, params: Any = None) -> tuple[Any, RecordedGradients]:
        # Cast to the parameter's dtype: the dtype of a variable must not change.
        return updates, RecordedGradients(
            jax.tree.map(lambda new, old: new.astype(old.dtype), updates, state.gradients)
        )

    recorder = optax.GradientTransformation(init, update)

    def make(model: nnx.Module) -> nnx.Optimizer:
        if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
            return nnx.Optimizer(model, optax.chain(recorder, optimizer), wrt=nnx.Param)
        user_optimizer = optimizer(model)
        if type(user_optimizer) is not nnx.Optimizer:
            raise OptimizerError(
                f"the gradients that a {type(user_optimizer).__name__} receives cannot be recorded.",
                fix="an optax transformation, or a function that returns an nnx.Optimizer",
            )
        module = _module_of(model, user_optimizer.wrt, updated)
        return nnx.Optimizer(module, optax.chain(recorder, user_optimizer.tx), wrt=user_optimizer.wrt)

    return make


def observing(step: Callable[..., Any], params: list[Any]) -> Callable[..., Any]:
    """Returns a train step that appends to `params` the shapes of the parameters that each update receives.

    Args:
      step: a function of model, optimizer and batch that updates the optimizer.
      params: a list, to which a trace of the returned function appends.
    """

    def observed(model: nnx.Module, optimizer: Any, batch: Any) -> Any:
        transformation = optimizer.tx

        def update(updates: Any, state: Any, values: Any = None, **extra: Any) -> Any:
            params.append(jax.tree.map(_shape, values))
            return optax.with_extra_args_support(transformation).update(updates, state, values, **extra)

        optimizer.tx = optax.GradientTransformationExtraArgs(transformation.init, update)
        try:
            return step(model, optimizer, batch)
        finally:
            optimizer.tx = transformation

    return observed


def _module_of(model: nnx.Module, wrt: Any, updated: Any) -> nnx.Module:
    """Returns the first module of a model that has parameters of these shapes; the model, if there are none.

    Modules with the same parameters, such as a teacher and its student, record the same arrays.

    Raises:
      SpanaxError: no module has them.
    """
    modules = [module for _, module in nnx.iter_modules(model)] if updated is not None else [model]
    for module in sorted(modules, key=lambda each: each is not model):
        params = jax.tree.map(_shape, nnx.as_pure(nnx.state(module, wrt)))
        if updated is None or params == updated:
            return module
    raise OptimizerError(
        "the gradients of this optimizer cannot be recorded: its parameters are not those of one module.",
        where=f"{len(jax.tree.leaves(updated))} arrays; the model has {len(modules)} modules",
        fix="an nnx.Optimizer of the model, or of one of its modules",
    )


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array))


PART = "nnx.Optimizer(model, tx, wrt=nnx.All(nnx.Param, nnx.PathContains('head'))) trains a part of the model"
STEP = "train_step= in place of loss=, which updates it"


def of_loss(optimizer: Any) -> Callable[[nnx.Module], nnx.Optimizer]:
    """The function from a model to its optimizer, which raises on one that a step around a loss cannot update.

    Args:
      optimizer: as `spanax.trace` takes it.

    Example:
      >>> import optax
      >>> type(of_loss(optax.adam(0.1))(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))).__name__
      'Optimizer'
    """

    def make(model: nnx.Module) -> nnx.Optimizer:
        created = optimizer_of(model, optimizer)
        if not (hasattr(created, "wrt") and _takes_model(created)):
            raise OptimizerError(
                f"`optimizer` returned a {type(created).__name__}, which a step around a `loss` cannot update.",
                fix=f"an nnx.Optimizer, or {STEP}",
            )
        if type(created).update is nnx.Optimizer.update:
            _check_same_parameters(model, created)
        return created

    return make


def _takes_model(optimizer: Any) -> bool:
    """Whether it is updated with a model and gradients; `nnx.ModelAndOptimizer` holds its model."""
    try:
        inspect.signature(optimizer.update).bind(None, None)
    except (AttributeError, TypeError):  # it has no `update`, or one of other arguments
        return False
    return True


def _check_same_parameters(model: nnx.Module, optimizer: nnx.Optimizer) -> None:
    """Raises unless the state of an optimizer is that of the parameters that its `wrt` selects in the model."""
    new = jax.eval_shape(lambda: nnx.state(nnx.Optimizer(model, optimizer.tx, wrt=optimizer.wrt)))
    expected = _shapes(new)
    state = _shapes(nnx.state(optimizer))
    if expected != state:
        raise OptimizerError(
            "`optimizer` returned an nnx.Optimizer of other parameters than its `wrt` selects in the model.",
            where=f"{len(state)} arrays of optimizer state; for the model there are {len(expected)}",
            fix=f"{PART}; or {STEP}",
        )


def _shapes(state: Any) -> dict[str, tuple[int, ...]]:
    flat = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in flat}


STATE_DTYPES = ("float32", "bfloat16")
"""The dtypes in which the state of an optimizer can be stored."""


def stored_as(dtype: Any, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that stores its floating-point state in a dtype between steps, and computes in float32.

    A moving average that changes by less than half an ulp per step (0.4 % in bfloat16) never changes. Use this for
    averages over less than about a hundred steps, not for Adam's second moment with the default `b2` of 0.999.

    Example:
      >>> state = stored_as("bfloat16", optax.adamw(1e-3, b2=0.95)).init({"w": jnp.ones(4)})
      >>> str(state[0].mu["w"].dtype), str(state[0].nu["w"].dtype), str(state[0].count.dtype)
      ('bfloat16', 'bfloat16', 'int32')
    """

    def init(params: Any) -> Any:
        return _cast(optimizer.init(params), dtype)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, _cast(state, jnp.float32), params)
        return updates, _cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _cast(state: Any, dtype: Any) -> Any:
    """Returns the state with its floating-point leaves in a dtype; integer counts are unchanged."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, state)


def averages(leaves: Sequence[Leaf]) -> dict[int, int]:
    """Returns the index of the average of each parameter that the optimizer averages, by the parameter's index."""
    paths = {leaf.path: index for index, leaf in enumerate(leaves)}
    pairs = [(leaf.path.partition(f".{AVERAGED}.")[2], index) for index, leaf in enumerate(leaves)]
    return {paths[path]: index for path, index in pairs if path in paths}


LEARNING_RATE = "learning_rate"
INJECTED = f"hyperparams.{LEARNING_RATE}"
"""The path of the learning rate in the state of `optax.inject_hyperparams`."""


def logged(schedule: Callable[[Any], Any], name: str = LEARNING_RATE) -> Callable[[Any], Any]:
    """Returns the same schedule; every step logs its value as a metric.

    A schedule called inside a loop or a branch (`optax.MultiSteps`) is not logged.

    Args:
      schedule: an optax schedule, a function from a count of updates to a number.
      name: the name of the metric.

    Example:
      >>> import numpy as np, optax, spanax
      >>> from flax import nnx
      >>> batch = np.ones((8, 4), "float32")
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
      ...     optimizer=optax.adamw(spanax.logged(optax.linear_schedule(0.5, 0.0, 4))),
      ...     batch=batch,
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="data"))
      >>> [float(run.step(batch)["learning_rate"]) for _ in range(2)]
      [0.5, 0.375]
    """
    return lambda count: marked(jnp.asarray(schedule(count)), METRIC + name)


def injected_rate(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, Any]:
    """Returns the learning rate of `optax.inject_hyperparams` as a metric; empty unless the state has exactly one."""
    rates = [value for leaf, value in zip(leaves, values, strict=True) if leaf.path.endswith(INJECTED)]
    return {LEARNING_RATE: rates[0]} if len(rates) == 1 else {}


def with_logged(graph: Graph, num_state: int, result: Any) -> tuple[Graph, Any]:
    """Returns the graph with the values of logged schedules as results, and the structure of its results.

    Args:
      graph: the graph of a step.
      num_state: the number of outputs that are the new state.
      result: the structure of the other outputs.
    """
    known = {*graph.body.inputs, *graph.constants, *(value for op in graph.body.ops for value in op.outputs)}
    marks = {mark.removeprefix(METRIC): value for mark, value in graph.marks.items() if mark.startswith(METRIC)}
    logged_values = {name: value for name, value in marks.items() if value in known}
    metrics = jax.tree.unflatten(result, graph.body.outputs[num_state:])
    if not logged_values or not isinstance(metrics, Mapping):
        return graph, result
    outputs, result = jax.tree.flatten(logged_values | dict(metrics))
    body = replace(graph.body, outputs=(*graph.body.outputs[:num_state], *outputs))
    return replace(graph, body=body), result
