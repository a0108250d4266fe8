"""Short training scripts in many styles: with `spanax.jit` on eight devices they train as with `nnx.jit` on one."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import spanax

STEPS, SIZE, WIDTH = 4, 16, 16
TOLERANCE = 2e-5

Losses = list[Any]
Jit = Callable[..., Callable[..., Any]]


def plain(function: Callable[..., Any], like: Any = None) -> Callable[..., Any]:
    return nnx.jit(function)


def sharded(function: Callable[..., Any], like: Any = None) -> Callable[..., Any]:
    return spanax.jit(function, mesh=None if like else "fsdp=8", like=like)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        x = random.normal(size=(SIZE, WIDTH)).astype(np.float32)
        yield x, np.tanh(x[:, :8]) + 0.5


class Mlp(nnx.Module):
    """Two layers around statistics, random masks and a counter."""

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(params=seed, dropout=seed + 1)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def mean_square(model: Any, x: Any, y: Any) -> Any:
    return jnp.square(model(x) - y).mean()


def functional(jit: Jit) -> tuple[Losses, Any]:
    """States go in and come out, and the model is merged inside of the function."""
    graphdef, params, rest = nnx.split(Mlp(), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: Any, y: Any) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params, rest, copy=True)
        value = mean_square(model, x, y)
        return value, nnx.split(model, nnx.Param, ...)[2]

    @jit
    def train_step(params: Any, rest: Any, batch: Any) -> tuple[Any, Any, Any]:
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, *batch)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), rest, value

    losses = []
    for batch in batches():
        params, rest, value = train_step(params, rest, batch)
        losses.append(value)
    return losses, nnx.merge(graphdef, params, rest)


def train_state(jit: Jit) -> tuple[Losses, Any]:
    """A `TrainState` of Flax with the moments of Adam, in and out."""
    graphdef, params, rest = nnx.split(Mlp(), nnx.Param, ...)
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2, eps=1e-3))

    @jit
    def train_step(state: Any, rest: Any, x: Any, y: Any) -> tuple[Any, Any]:
        loss = lambda params: mean_square(nnx.merge(graphdef, params, rest, copy=True), x, y)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for x, y in batches():
        state, value = train_step(state, rest, x, y)
        losses.append(value)
    assert int(state.step) == STEPS
    return losses, (state.params, state.opt_state)


def metrics(jit: Jit) -> tuple[Losses, Any]:
    """Training and evaluation take turns: metrics and generators are arguments, and the mode of the model changes."""
    model, rngs = Mlp(), nnx.Rngs(dropout=7)
    model.dropout = nnx.Dropout(0.2)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
    averages = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    def loss(model: Mlp, x: Any, y: Any, rngs: Any) -> tuple[Any, Any]:
        logits = model.down(model.dropout(model.norm(model.up(x)), rngs=rngs))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y.argmax(-1)).mean(), logits

    @jit
    def train_step(model: Any, optimizer: Any, averages: Any, batch: Any, rngs: Any) -> None:
        (value, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model, batch["x"], batch["y"], rngs)
        averages.update(loss=value, logits=logits, labels=batch["y"].argmax(-1))
        optimizer.update(model, grads)

    def evaluate(model: Any, averages: Any, batch: Any) -> None:
        value, logits = loss(model, batch["x"], batch["y"], None)
        averages.update(loss=value, logits=logits, labels=batch["y"].argmax(-1))

    losses, evaluate = [], jit(evaluate, like=train_step)
    for x, y in batches():
        batch = {"x": x, "y": y}
        model.train()
        train_step(model, optimizer, averages, batch, rngs)
        model.eval()
        losses.append(averages.compute()["loss"])
        averages.reset()
        evaluate(model, averages, batch)
        losses.append(averages.compute()["accuracy"])
    return losses, (model, optimizer, averages, rngs)


class Stack(nnx.Module):
    """Layers with a leading dim, in a scan."""

    def __init__(self) -> None:
        create = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)))
        self.layers = create(nnx.Rngs(0))
        self.down = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        x, _ = nnx.scan(lambda x, layer: (x + jnp.tanh(layer(x)), None))(x, self.layers)
        return self.down(x)


def scan(jit: Jit) -> tuple[Losses, Any]:
    """Layers in a scan, and a copy of the model that follows it as a moving average."""
    model, average = Stack(), Stack()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @jit
    def train_step(model: Any, average: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = nnx.value_and_grad(mean_square)(model, x, y)
        optimizer.update(model, grads)
        mean = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, nnx.state(average), nnx.state(model))
        nnx.update(average, mean)
        return value

    evaluate = jit(mean_square, like=train_step)
    losses = []
    for x, y in batches():
        losses += [train_step(model, average, optimizer, x, y), evaluate(average, x, y=y)]
    return losses, (model, average, optimizer)


class Penalty(nnx.Variable[Any]):
    """A part of a loss, which a layer leaves and the loss collects."""


class Vae(nnx.Module):
    """An autoencoder that draws its code."""

    def __init__(self) -> None:
        self.rngs = nnx.Rngs(params=0, noise=1)
        self.up, self.down = nnx.Linear(WIDTH, 16, rngs=self.rngs), nnx.Linear(8, WIDTH, rngs=self.rngs)

    def __call__(self, x: Any) -> Any:
        mean, log_std = jnp.split(self.up(x), 2, axis=-1)
        self.penalty = Penalty(jnp.mean(jnp.exp(2 * log_std) + mean**2 - 1 - 2 * log_std) / 2)
        return self.down(mean + jnp.exp(log_std) * jax.random.normal(self.rngs.noise(), mean.shape))


def vae(jit: Jit) -> tuple[Losses, Any]:
    """A Variable is created in the model and collected in the loss; the random numbers are those of one device."""
    model = Vae()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)

    @jit
    def train_step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            error = mean_square(model, x, x)
            return error + 0.1 * sum(jax.tree.leaves(nnx.pop(model, Penalty)))

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    sample = jit(lambda model, z: jax.nn.sigmoid(model.down(z)).sum(), like=train_step)
    losses = [train_step(model, optimizer, x) for x, _ in batches()]
    return [*losses, sample(model, np.ones((SIZE, 8), np.float32))], (model, optimizer)


def adversaries(jit: Jit) -> tuple[Losses, Any]:
    """Two models, each with an optimizer, whose steps take turns."""
    generator, critic = Mlp(0), nnx.Linear(8, 1, rngs=nnx.Rngs(5))
    of_generator, of_critic = (nnx.Optimizer(m, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param) for m in (generator, critic))

    def critic_loss(critic: Any, generator: Any, x: Any, y: Any) -> Any:
        return nnx.softplus(-critic(y)).mean() + nnx.softplus(critic(jax.lax.stop_gradient(generator(x)))).mean()

    @jit
    def critic_step(critic: Any, generator: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = nnx.value_and_grad(critic_loss)(critic, generator, x, y)
        optimizer.update(critic, grads)
        return value

    def generator_step(generator: Any, critic: Any, optimizer: Any, x: Any) -> Any:
        loss = lambda generator: nnx.softplus(-critic(generator(x))).mean()  # noqa: E731
        value, grads = nnx.value_and_grad(loss)(generator)
        optimizer.update(generator, grads)
        return value

    losses, generator_step = [], jit(generator_step, like=critic_step)
    for x, y in batches():
        losses += [critic_step(critic, generator, of_critic, x, y), generator_step(generator, critic, of_generator, x)]
    return losses, (generator, critic, of_generator, of_critic)


SCRIPTS = [functional, train_state, metrics, scan, vae, adversaries]


def arrays(objects: Any) -> dict[str, Any]:
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(objects), is_leaf=is_variable)
    return {jax.tree_util.keystr(path): leaf[...] if is_variable(leaf) else leaf for path, leaf in leaves}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_trains_as_on_one_device(script: Callable[[Jit], tuple[Losses, Any]]) -> None:
    expected, before = script(plain)
    losses, after = script(sharded)
    np.testing.assert_allclose(np.array(losses), np.array(expected), rtol=TOLERANCE)
    expected_arrays, trained = arrays(before), arrays(after)
    assert expected_arrays.keys() == trained.keys()
    for path, array in expected_arrays.items():
        value = trained[path]
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            array, value = jax.random.key_data(array), jax.random.key_data(value)
        np.testing.assert_allclose(value, array, rtol=10 * TOLERANCE, atol=10 * TOLERANCE, err_msg=path)
    largest = max(trained.values(), key=lambda array: array.size)
    assert largest.size == 8 * largest.addressable_shards[0].data.size
