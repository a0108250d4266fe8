"""Learning: what of a traced step keeps parameters from learning, and what only looks as if it did."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.trace.analysis.training_signal import Flaw, flaws

BATCH = jax.ShapeDtypeStruct((16, 8), "float32")


class Model(nnx.Module):
    """Two layers, a dropout, and a head that a loss may leave out."""

    def __init__(self, rngs: nnx.Rngs):
        self.encoder = nnx.Linear(8, 8, rngs=rngs)
        self.decoder = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.unused = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array, hidden: Callable[[Any], Any] = lambda h: h) -> jax.Array:
        return self.decoder(self.dropout(hidden(nnx.relu(self.encoder(x)))))


def mean_square(model: Any, x: Any) -> Any:
    return jnp.square(model(x)).mean()


def with_key(key: Callable[[Any], Any]) -> Any:
    """A loss that draws a mask of the batch's shape with a key."""

    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        return jnp.square(y * jax.random.bernoulli(key(model), 0.5, y.shape)).mean()

    return loss


def projected(model: Any, x: Any) -> Any:
    """Fixed random features: numbers that do not depend on the batch."""
    return jnp.square(model(x) @ jax.random.normal(jax.random.key(7), (8, 4))).mean()


def step_of(loss: Any) -> Any:
    def train_step(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return {"loss": value}

    return train_step


def flaws_of(loss: Any = None, build: Any = Model, optimizer: Any = None, **options: Any) -> dict[Flaw, list[str]]:
    if "train_step" not in options:
        options["loss"] = loss
    program = spanax.trace(build=build, optimizer=optimizer or optax.adamw(0.1), batch=BATCH, **options)
    result: dict[Flaw, list[str]] = {}
    for kind, path, _, _ in flaws(program.step, program.leaves, has_loss=program.evaluation is not None):
        result.setdefault(kind, []).append(path)
    return result


UNUSED = {Flaw.UNUSED: ["unused.bias"]}
FIXED_KEY = np.zeros(2, np.uint32)
CASES: dict[str, tuple[Any, set[Flaw]]] = {
    "an ordinary loss": (mean_square, set()),
    "a constant": (lambda model, x: jnp.float32(3.0), {Flaw.NO_GRADIENT, Flaw.NO_BATCH}),
    "a loss of the batch alone": (lambda model, x: x.mean(), {Flaw.NO_GRADIENT}),
    "a loss times zero": (lambda model, x: 0.0 * mean_square(model, x), {Flaw.NO_GRADIENT}),
    "an accuracy as a float": (lambda model, x: (model(x).argmax(-1) == 1).mean(), {Flaw.NO_GRADIENT}),
    "a loss of parameters alone": (lambda model, x: mean_square(model, jnp.ones((4, 8))), {Flaw.NO_BATCH}),
    "a gradient cut inside": (
        lambda model, x: jnp.square(model(x, jax.lax.stop_gradient)).mean(), {Flaw.NO_GRADIENT_IN_PART},
    ),
    "a mask by nnx.Rngs(0)": (with_key(lambda model: nnx.Rngs(0).dropout()), {Flaw.SAME_NUMBERS}),
    "a mask by a key of integers": (with_key(lambda model: jax.random.PRNGKey(3)), {Flaw.SAME_NUMBERS}),
    "a mask by a key from outside": (with_key(lambda model: FIXED_KEY), {Flaw.SAME_NUMBERS}),
    "a mask by the model's own key": (with_key(lambda model: model.dropout.rngs()), set()),
    "a mask by a key folded with the batch": (
        lambda model, x: with_key(lambda _: jax.random.fold_in(FIXED_KEY, x.sum().astype(int)))(model, x), set(),
    ),
    "fixed random features": (projected, set()),
}  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_exactly_the_flaw_of_a_loss_is_listed(name: str, microbatches: int) -> None:
    loss, expected = CASES[name]
    result = flaws_of(loss, microbatches=microbatches)
    result.pop(Flaw.UNUSED, None)
    assert {*result} == expected


def test_paths_are_those_of_the_parameters_concerned() -> None:
    loss = CASES["a gradient cut inside"][0]
    assert flaws_of(loss) == {Flaw.NO_GRADIENT_IN_PART: ["encoder.bias"], **UNUSED}
    assert flaws_of(mean_square) == UNUSED


def test_parameters_outside_wrt_are_not_expected_to_learn() -> None:
    class Tuned(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    lora = lambda model: nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)  # noqa: E731
    assert flaws_of(mean_square, Tuned, lora) == {}


def test_layers_in_a_scan_and_under_remat_learn() -> None:
    build = lambda rngs: spanax.Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 3, rngs=rngs)  # noqa: E731
    for policy in (None, "full"):
        assert flaws_of(mean_square, build, remat=policy) == {}


@pytest.mark.parametrize("jit", [False, True])
def test_custom_train_steps(jit: bool) -> None:
    wrap = nnx.jit if jit else lambda step: step
    assert flaws_of(train_step=wrap(step_of(mean_square))) == {}
    constant = lambda model, x: jnp.float32(3.0) + 0 * x.sum()  # noqa: E731
    assert flaws_of(train_step=wrap(step_of(constant))) == {Flaw.NO_BATCH: [""]}
    masked = step_of(CASES["a mask by nnx.Rngs(0)"][0])
    assert flaws_of(train_step=wrap(masked)) == {Flaw.SAME_NUMBERS: [""]}
