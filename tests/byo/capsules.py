"""Capsules routed by agreement in a loop, a ConvLSTM by scan over frames, a conditional random field as loss."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

FRAMES, TAGS = 6, 4


class ConvLSTM(nnx.Module):
    def __init__(self, cin, hidden, rngs):
        self.hidden, self.gates = hidden, nnx.Conv(cin + hidden, 4 * hidden, (3, 3), rngs=rngs)

    def __call__(self, frames):
        def step(carry, frame):
            h, c = carry
            i, f, g, o = jnp.split(self.gates(jnp.concatenate([frame, h], axis=-1)), 4, axis=-1)
            c = nnx.sigmoid(f + 1) * c + nnx.sigmoid(i) * jnp.tanh(g)
            h = nnx.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((*frames.shape[:1], *frames.shape[2:4], self.hidden))
        _, out = jax.lax.scan(step, (zeros, zeros), jnp.moveaxis(frames, 1, 0))
        return jnp.moveaxis(out, 0, 1)


def squash(x):
    norm = jnp.sum(x**2, axis=-1, keepdims=True)
    return norm / (1 + norm) * x / jnp.sqrt(norm + 1e-6)


class Capsules(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.lstm = ConvLSTM(2, 8, rngs)
        self.primary = nnx.Conv(8, 16, (2, 2), strides=2, rngs=rngs)
        self.votes = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (16, TAGS, 4, 8)))
        self.transitions = nnx.Param(jnp.zeros((TAGS, TAGS)))

    def __call__(self, frames):
        x = self.lstm(frames)
        b, t = x.shape[:2]
        u = squash(self.primary(x.reshape(b * t, *x.shape[2:])).reshape(b, t, 16, 4))
        votes = jnp.einsum("btik,ijkd->btijd", u, self.votes[...])

        def route(_, logits):
            agreed = jax.nn.softmax(logits, axis=-1)
            v = squash(jnp.einsum("btij,btijd->btjd", agreed, jax.lax.stop_gradient(votes)))
            return logits + jnp.einsum("btijd,btjd->btij", jax.lax.stop_gradient(votes), v)

        logits = jax.lax.fori_loop(0, 2, route, jnp.zeros(votes.shape[:-1]))
        v = squash(jnp.einsum("btij,btijd->btjd", jax.nn.softmax(logits, axis=-1), votes))
        return 4 * jnp.linalg.norm(v + 1e-6, axis=-1)


build = Capsules


def loss(model, batch):
    scores, tags, transitions = model(batch["frames"]), batch["tags"], model.transitions[...]

    def forward(alpha, score):
        return jax.nn.logsumexp(alpha[:, :, None] + transitions + score[:, None], axis=1), None

    alpha, _ = jax.lax.scan(forward, scores[:, 0], scores[:, 1:].swapaxes(0, 1))
    emitted = jnp.take_along_axis(scores, tags[..., None], axis=-1)[..., 0].sum(1)
    moved = transitions[tags[:, :-1], tags[:, 1:]].sum(1)
    return jnp.mean(jax.nn.logsumexp(alpha, axis=-1) - emitted - moved)


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "frames": rng.normal(size=(size, FRAMES, 4, 4, 2)).astype(np.float32),
        "tags": rng.integers(0, TAGS, (size, FRAMES)).astype(np.int32),
    }
