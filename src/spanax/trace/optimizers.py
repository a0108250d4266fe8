"""Optimizers: those with a name, their validation, and wrappers that record gradients, log schedules and narrow state."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.errors import OptimizerError
from spanax.trace.jaxpr.graph import METRIC, Graph, marked
from spanax.trace.recipe import AVERAGED
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


Schedule = Callable[[Any], Any]


def scheduled(learning_rate: float, num_steps: int, warmup: int, *, kind: str | None, end: float) -> Schedule:
    """Returns a schedule: a warm-up from zero, then a cosine to `end`, a line to zero or a constant rate."""
    last = max(num_steps, warmup + 1)
    if kind in (None, "cosine"):
        return optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, last, end_value=end)
    final = learning_rate if kind == "constant" else 0.0
    parts = [optax.linear_schedule(0.0, learning_rate, warmup)]
    parts.append(optax.linear_schedule(learning_rate, final, last - warmup))
    joined: Schedule = optax.join_schedules(parts, [warmup])
    return joined


def usual_schedule(learning_rate: float, num_steps: int, kind: str | None, warmup_steps: int | None) -> Schedule:
    """Returns the logged schedule with a warm-up of a tenth of the run, at most 100 steps, and a decay to a tenth."""
    warmup = max(1, min(100, num_steps // 10)) if warmup_steps is None else warmup_steps
    return logged(scheduled(learning_rate, num_steps, warmup, kind=kind, end=learning_rate / 10))


def adamw(
    learning_rate: float,
    num_steps: int,
    *,
    state_dtype: Any = None,
    schedule: str | None = None,
    warmup_steps: int | None = None,
    weight_decay: float = 0.1,
) -> optax.GradientTransformation:
    """Returns AdamW with warmup for a tenth of the run (at most 100 steps) and cosine decay to a tenth of the rate.

    Its moments average over 10 and 20 steps, and both may be stored in bfloat16. Source: DeepSeek-V3, 2024 (arXiv
    2412.19437), section 3.3.
    """
    rate = usual_schedule(learning_rate, num_steps, schedule, warmup_steps)
    optimizer = optax.adamw(rate, b2=0.95, weight_decay=weight_decay)
    return optimizer if state_dtype is None else stored_as(state_dtype, optimizer)


def sgd(
    learning_rate: float,
    num_steps: int,
    *,
    state_dtype: Any = None,
    schedule: str | None = None,
    warmup_steps: int | None = None,
    weight_decay: float = 1e-4,
) -> optax.GradientTransformation:
    """Returns SGD with Nesterov momentum, warmup for 1/20 of the run, and cosine decay to zero.

    Weight decay applies to weights, not to biases or BatchNorm's scales.

    Source: Goyal et al., 2017 (arXiv 1706.02677), sections 2.2, 5.1 and 5.3; the cosine of Loshchilov and Hutter, 2016
    (arXiv 1608.03983).
    """
    warmup = max(1, num_steps // 20) if warmup_steps is None else warmup_steps
    rate = logged(scheduled(learning_rate, num_steps, warmup, kind=schedule, end=0.0))
    decay = optax.add_decayed_weights(weight_decay, mask=partial(jax.tree.map, lambda array: array.ndim > 1))
    return optax.chain(decay, optax.sgd(rate, momentum=0.9, nesterov=True, accumulator_dtype=state_dtype))


def lion(
    learning_rate: float,
    num_steps: int,
    *,
    state_dtype: Any = None,
    schedule: str | None = None,
    warmup_steps: int | None = None,
    weight_decay: float = 0.1,
) -> optax.GradientTransformation:
    """Returns Lion, whose rates are 3 to 10 times lower than AdamW's.

    Source: Chen et al., 2023 (arXiv 2302.06675), section 5.
    """
    rate = usual_schedule(learning_rate, num_steps, schedule, warmup_steps)
    return optax.lion(rate, mu_dtype=state_dtype, weight_decay=weight_decay)


def adafactor(
    learning_rate: float,
    num_steps: int,
    *,
    schedule: str | None = None,
    warmup_steps: int | None = None,
    weight_decay: float = 0.1,
) -> optax.GradientTransformation:
    """Returns Adafactor without momentum and with the given rates, not relative to the parameters.

    Its second moment averages over ever more steps, too many for bfloat16. Source: Shazeer and Stern, 2018 (arXiv
    1804.04235), sections 3, 6 and 7.2.
    """
    rate = usual_schedule(learning_rate, num_steps, schedule, warmup_steps)
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def muon(
    learning_rate: float,
    num_steps: int,
    *,
    axes: Mapping[str, Sequence[str | None]],
    state_dtype: Any = None,
    schedule: str | None = None,
    warmup_steps: int | None = None,
    weight_decay: float = 0.1,
) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the layers, with the rates of AdamW, and AdamW for all other parameters.

    Source: Liu et al., 2025 (arXiv 2502.16982), section 2.2.

    Args:
      learning_rate: the peak learning rate.
      num_steps: the number of steps of the run.
      axes: the named axes of each parameter by path, from which its matrices follow.
      state_dtype: the dtype of the first moments.
      schedule: as in `Recipe`.
      warmup_steps: as in `Recipe`.
      weight_decay: as in `Recipe`.
    """
    from optax import contrib

    def matrix(path: Any, array: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names = axes.get(name) or axes.get(name.removesuffix(".value"), ())  # of the array, or of its Variable
        is_vector = "bias" in name.rpartition(".")[2] or "bias.value" in name
        sides = None if is_vector else matrix_dims(array.shape, names)
        return sides and contrib.MuonDimensionNumbers(*sides)

    return contrib.muon(
        usual_schedule(learning_rate, num_steps, schedule, warmup_steps),
        weight_decay=weight_decay,
        mu_dtype=state_dtype,
        adam_b2=0.95,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=partial(jax.tree_util.tree_map_with_path, matrix),
        consistent_rms=0.2,
    )


STACKS = {"layers", "experts"}
"""Axes along which a parameter has several matrices."""

TABLES = {"vocab", "classes", "seq"}
"""Axes of embeddings, positions and heads, which are no matrices of layers."""


def matrix_dims(shape: Sequence[int], axes: Sequence[str | None]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the dims of the two sides of a parameter's matrices, the most square ones; None if it has no matrix.

    Example:
      >>> matrix_dims((4, 128, 3, 8, 16), ("layers", "embed", None, "heads", "head_dim"))
      ((1,), (2, 3, 4))
      >>> matrix_dims((4, 128), ("layers", "embed")), matrix_dims((256, 128), ("vocab", "embed"))
      (None, None)
    """
    dims = tuple(dim for dim, name in enumerate(axes) if name not in STACKS)
    if len(dims) < 2 or TABLES.intersection(axes):
        return None
    splits = [(dims[:cut], dims[cut:]) for cut in range(1, len(dims))]
    sizes = [[math.prod(shape[dim] for dim in side) for side in split] for split in splits]
    return min(zip(splits, sizes, strict=True), key=lambda pair: max(pair[1]) / min(pair[1]))[0]


class Average(NamedTuple):
    """The state of an average of the parameters; `spanax.trace.recipe.AVERAGED` is the name of its field."""

    count: Any
    averaged_params: Any


def averaging(decay: float, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer with a moving average of the parameters, in float32, as the last part of its state.

    The decay of the first steps is lower, (1 + steps) / (10 + steps), so that the initial parameters are forgotten.

    Example:
      >>> optimizer = averaging(0.5, optax.sgd(1.0))
      >>> state = optimizer.init({"w": jnp.float32(1.0)})
      >>> _, state = optimizer.update({"w": jnp.float32(1.0)}, state, {"w": jnp.float32(1.0)})
      >>> float(state[-1].averaged_params["w"])  # of 1, and of 0 after the step
      0.1
    """

    def init(params: Any) -> Average:
        return Average(jnp.zeros((), jnp.int32), jax.tree.map(_wide, params))

    def update(updates: Any, state: Average, params: Any = None) -> tuple[Any, Average]:
        weight = 1 - jnp.minimum(decay, (1 + state.count) / (10 + state.count))
        new = jax.tree.map(_wide, optax.apply_updates(params, updates))
        average = jax.tree.map(lambda old, value: old + weight * (value - old), state.averaged_params, new)
        return updates, Average(state.count + 1, average)

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def _wide(array: jax.Array) -> jax.Array:
    """Returns an array in float32 if it is in a narrower dtype, in which small changes would be lost."""
    return jnp.array(array, jnp.promote_types(array.dtype, jnp.float32))


NAMED: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw, "sgd": sgd, "lion": lion, "adafactor": adafactor, "muon": muon,
}  # fmt: skip
"""By name, as in `spanax.trace.recipe.OPTIMIZERS`."""
