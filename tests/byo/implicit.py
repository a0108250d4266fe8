"""Depth without layers: a neural ODE by Runge-Kutta in a fori_loop, a fixed point by while_loop under custom_vjp."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

DIM = 32


def solve(f, start):
    def proceed(carry):
        step, before, now = carry
        return (step < 30) & (jnp.max(jnp.abs(now - before)) > 1e-6)

    def again(carry):
        step, _, now = carry
        return step + 1, now, f(now)

    return jax.lax.while_loop(proceed, again, (0, start, f(start)))[2]


@jax.custom_vjp
def fixed_point(weights, x):
    return solve(lambda z: cell(weights, x, z), jnp.zeros_like(x))


def cell(weights, x, z):
    w, b = weights
    return jnp.tanh(0.4 * z @ w + x + b)


def forward(weights, x):
    z = fixed_point(weights, x)
    return z, (weights, x, z)


def backward(retained, cotangent):
    weights, x, z = retained
    _, pull = jax.vjp(lambda z: cell(weights, x, z), z)
    solved = solve(lambda u: cotangent + pull(u)[0], cotangent)
    _, pull = jax.vjp(lambda weights, x: cell(weights, x, z), weights, x)
    return pull(solved)


fixed_point.defvjp(forward, backward)


class Implicit(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.enter, self.leave = nnx.Linear(16, DIM, rngs=rngs), nnx.Linear(DIM, 4, rngs=rngs)
        self.field = nnx.Sequential(nnx.Linear(DIM + 1, 64, rngs=rngs), nnx.tanh, nnx.Linear(64, DIM, rngs=rngs))
        self.w = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (DIM, DIM)))
        self.b = nnx.Param(jnp.zeros(DIM))

    def slope(self, t, x):
        return self.field(jnp.concatenate([x, jnp.broadcast_to(t, (len(x), 1))], axis=-1))

    def __call__(self, x):
        dt = 0.25

        def rk4(i, x):
            t = i * dt
            k1 = self.slope(t, x)
            k2 = self.slope(t + dt / 2, x + dt / 2 * k1)
            k3 = self.slope(t + dt / 2, x + dt / 2 * k2)
            k4 = self.slope(t + dt, x + dt * k3)
            return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

        x = jax.lax.fori_loop(0, 4, rk4, self.enter(x))
        return self.leave(fixed_point((self.w[...], self.b[...]), x))


build = Implicit


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch(size):
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=(size, n)).astype(np.float32) for key, n in (("x", 16), ("y", 4))}
