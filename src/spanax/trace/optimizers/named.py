"""The optimizers that `Recipe` names, each a function of a learning rate and a number of steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spanax.trace.optimizers.wrapped import logged, stored_as

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
    """The state of an average of the parameters; `spanax.trace.optimizers.recipe.AVERAGED` is the name of its field."""

    count: Any
    averaged_params: Any


def averaging(decay: float, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer with a moving average of the parameters, in float32, as the last part of its state.

    The decay of the first steps is lower, (1 + steps) / (10 + steps), so that the initial parameters are forgotten.

    Example:
      >>> optimizer = averaging(0.5, optax.sgd(1.0))
      >>> state = optimizer.init({"w": jnp.float32(1.0)})
      >>> _, state = optimizer.update({"w": jnp.float32(1.0)}, state, {"w": jnp.float32(1.0)})
      >>> round(float(state[-1].averaged_params["w"]), 3)  # of 1, and of 0 after the step
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
"""By name, as in `spanax.trace.optimizers.recipe.OPTIMIZERS`."""
