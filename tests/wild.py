"""Models and train steps from elsewhere, as strangers write them, each with what once went wrong in it.

Shape suffixes: B batch, M microbatches, T positions, D embed, F mlp, V vocab.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax import softmax_cross_entropy_with_integer_labels as softmax_cross_entropy

from zoo import batches, floats, ints, squared_error

CALM = optax.adamw(1e-2, eps=0.1)
SGD = optax.sgd(1e-2)


@dataclasses.dataclass(frozen=True)
class Wild:
    """A model, data for a batch size, and its loss or a train step of its own."""

    build: Callable[[nnx.Rngs], nnx.Module]
    batch: Callable[..., dict]
    loss: Callable[[Any, dict], Any] | None = None
    train_step: Callable[[Any, Any, dict], Any] | None = None
    optimizer: Any = CALM


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, sizes: tuple[int, int, int] = (32, 64, 16)):
        self.up, self.down = nnx.Linear(*sizes[:2], rngs=rngs), nnx.Linear(*sizes[1:], rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def accumulated(model, optimizer, batch):
    """Gradients over four contiguous microbatches, which a plain reshape takes apart."""
    parts = jax.tree.map(lambda x: x.reshape(4, x.shape[0] // 4, *x.shape[1:]), batch)
    graphdef, params = nnx.split(model)

    def item(total, part):
        loss, grads = jax.value_and_grad(lambda params: squared_error(nnx.merge(graphdef, params), part))(params)
        return jax.tree.map(jnp.add, total, grads), loss

    grads, losses = jax.lax.scan(item, jax.tree.map(jnp.zeros_like, params), parts)
    optimizer.update(model, jax.tree.map(lambda grad: grad / 4, grads))
    return {"loss": losses.mean()}


def sliced(model, optimizer, batch):
    """The same by slices in a counted loop, whose sums begin with a plain number."""
    graphdef, params = nnx.split(model)

    def item(at, carry):
        total, losses = carry
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at * x.shape[0] // 4, x.shape[0] // 4), batch)
        loss, grads = jax.value_and_grad(lambda params: squared_error(nnx.merge(graphdef, params), part))(params)
        return jax.tree.map(jnp.add, total, grads), losses + loss

    grads, losses = jax.lax.fori_loop(0, 4, item, (jax.tree.map(jnp.zeros_like, params), 0.0))
    optimizer.update(model, jax.tree.map(lambda grad: grad / 4, grads))
    return {"loss": losses / 4}


class Tokens(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.mlp = nnx.Embed(64, 32, rngs=rngs), MLP(rngs, (32, 64, 32))
        self.head = nnx.Linear(32, 64, rngs=rngs)


def chunked(model, batch):
    """Logits of an eighth of the tokens at a time, as those do who have no room for all of them."""
    h_BTD = model.embed(batch["x"])
    h_MRD, y_MR = (h_BTD + model.mlp(h_BTD)).reshape(8, -1, 32), batch["y"].reshape(8, -1)
    score = jax.checkpoint(lambda part: softmax_cross_entropy(model.head(part[0]), part[1]).mean())
    return jax.lax.map(score, (h_MRD, y_MR)).mean()


class DeepKernel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.features, self.noise = MLP(rngs, (32, 64, 8)), nnx.Param(jnp.array(-1.0))


def likelihood(model, batch):
    """A Gaussian process over the examples of the batch: a decomposition of what the batch splits on both sides."""
    z = model.features(batch["x"])
    kernel = jnp.exp(-jnp.square(z[:, None] - z[None]).sum(-1)) + (jnp.exp(model.noise) + 0.1) * jnp.eye(len(z))
    factor = jnp.linalg.cholesky(kernel)
    weights = jax.scipy.linalg.cho_solve((factor, True), batch["y"])
    return (0.5 * (batch["y"] * weights).sum() + jnp.log(jnp.diag(factor)).sum()) / 100


class Frozen(nnx.Variable):
    """A custom variable: not a parameter, so it is not trained."""


class Quantized(nnx.Module):
    """A base in eight bits, and a low-rank addition that is trained."""

    def __init__(self, fan_in: int, fan_out: int, rngs: nnx.Rngs):
        self.base = Frozen(jax.random.randint(rngs.params(), (fan_in, fan_out), -127, 128).astype(jnp.int8))
        self.scale = Frozen(jnp.full((1, fan_out), 0.01))
        self.a = nnx.Param(jax.random.normal(rngs.params(), (fan_in, 4)) * 0.1)
        self.b = nnx.Param(jnp.zeros((4, fan_out)))

    def __call__(self, x):
        return x @ (self.base[...].astype(jnp.float32) * self.scale[...]) + x @ self.a[...] @ self.b[...]


def quantized(rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(Quantized(32, 128, rngs), jax.nn.gelu, Quantized(128, 16, rngs), lambda x: 0.1 * x)


class GAN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.maker, self.judge, self.rngs = MLP(rngs, (16, 64, 32)), MLP(rngs, (32, 64, 1)), rngs.fork()


def two_optimizers(model: GAN) -> dict[str, nnx.Optimizer]:
    return {name: nnx.Optimizer(getattr(model, name), CALM, wrt=nnx.Param) for name in ("maker", "judge")}


def adversaries(model, optimizers, batch):
    noise = model.rngs.normal((batch["x"].shape[0], 16))
    built = model.maker(noise)

    def judge_loss(judge):
        return jax.nn.softplus(-judge(batch["x"])).mean() + jax.nn.softplus(judge(built)).mean()

    judged, grads = nnx.value_and_grad(judge_loss)(model.judge)
    optimizers["judge"].update(model.judge, grads)
    fooled, grads = nnx.value_and_grad(lambda maker: jax.nn.softplus(-model.judge(maker(noise))).mean())(model.maker)
    optimizers["maker"].update(model.maker, grads)
    return {"loss": judged, "maker_loss": fooled}


class Actor(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.policy, self.rngs = MLP(rngs, (8, 64, 4)), rngs.fork()


def proximal(model, optimizer, batch):
    """Two epochs over shuffled minibatches, with updates inside of two loops."""
    graphdef, state = nnx.split((model, optimizer))
    key, size = model.rngs.shuffle(), batch["x"].shape[0]

    def update(state, part):
        model, optimizer = nnx.merge(graphdef, state)

        def loss(model):
            chosen = jax.nn.log_softmax(model.policy(part["x"]))[jnp.arange(part["y"].shape[0]), part["y"]]
            ratio = jnp.exp(chosen - part["before"])
            return -jnp.minimum(ratio * part["gain"], jnp.clip(ratio, 0.8, 1.2) * part["gain"]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    def epoch(state, key):
        order = jax.random.permutation(key, size)
        return jax.lax.scan(update, state, jax.tree.map(lambda x: x[order].reshape(4, -1, *x.shape[1:]), batch))

    state, losses = jax.lax.scan(epoch, state, jax.random.split(key, 2))
    nnx.update((model, optimizer), state)
    return {"loss": losses.mean()}


class Solver(nnx.Module):
    """The fixed point of a layer, found by a loop of unknown length, with a gradient of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(32, 32, kernel_init=nnx.initializers.normal(0.05), rngs=rngs)
        self.enter, self.leave = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        graphdef, params = nnx.split((self.inner, self.enter))

        def turn(params, x, z):
            inner, enter = nnx.merge(graphdef, params)
            return jnp.tanh(inner(z) + enter(x))

        def until(change, first):
            def again(carry):
                after = change(carry[0])
                return after, jnp.abs(after - carry[0]).max(), carry[2] + 1

            return jax.lax.while_loop(lambda c: (c[1] > 1e-6) & (c[2] < 30), again, (first, jnp.inf, 0))[0]

        @jax.custom_vjp
        def solve(params, x):
            return until(lambda z: turn(params, x, z), jnp.zeros_like(x))

        def forward(params, x):
            z = solve(params, x)
            return z, (params, x, z)

        def backward(retained, grad):
            params, x, z = retained
            around = jax.vjp(lambda z: turn(params, x, z), z)[1]
            total = until(lambda g: grad + around(g)[0], grad)
            return jax.vjp(lambda params, x: turn(params, x, z), params, x)[1](total)

        solve.defvjp(forward, backward)
        return self.leave(solve(params, x))


VECTORS = batches(x=floats(32), y=floats(16))
TOKENS = batches(x=ints(64, 32), y=ints(64, 32))
ACTIONS = batches(x=floats(8), y=ints(4), before=lambda rng, size: np.full(size, -1.4, np.float32), gain=floats())

WILD = {
    "accumulated": Wild(MLP, VECTORS, train_step=accumulated, optimizer=SGD),
    "sliced": Wild(MLP, VECTORS, train_step=sliced, optimizer=SGD),
    "chunked": Wild(Tokens, TOKENS, chunked),
    "gaussian-process": Wild(DeepKernel, batches(x=floats(32), y=floats()), likelihood),
    "quantized": Wild(quantized, VECTORS, squared_error),
    "adversaries": Wild(GAN, batches(x=floats(32)), train_step=adversaries, optimizer=two_optimizers),
    "proximal": Wild(Actor, ACTIONS, train_step=proximal),
    "fixed-point": Wild(Solver, VECTORS, squared_error),
}
