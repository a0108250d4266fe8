"""Three heads on one trunk, their losses weighed by learned uncertainties; two of the heads are one module, shared."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class MultiTask(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.trunk = nnx.Sequential(
            nnx.Linear(24, 64, rngs=rngs),
            nnx.BatchNorm(64, rngs=rngs),
            nnx.silu,
            nnx.Linear(64, 64, rngs=rngs),
            nnx.silu,
        )
        shared = nnx.Linear(64, 8, rngs=rngs)
        self.heads = nnx.Dict(left=shared, right=shared, value=nnx.Linear(64, 1, rngs=rngs))
        self.log_variance = nnx.Param(jnp.zeros(3))

    def __call__(self, x):
        h = self.trunk(x)
        flipped = self.trunk(x[:, ::-1])
        return self.heads.left(h), self.heads.right(flipped), self.heads.value(h).squeeze(-1)


build = MultiTask


def loss(model, batch):
    left, right, value = model(batch["x"])
    losses = jnp.stack([
        optax.softmax_cross_entropy_with_integer_labels(left, batch["left"]).mean(),
        optax.softmax_cross_entropy_with_integer_labels(right, batch["right"]).mean(),
        optax.huber_loss(value, batch["value"]).mean(),
    ])  # fmt: skip
    weights = model.log_variance[...]
    return jnp.sum(jnp.exp(-weights) * losses + weights), dict(zip(("left", "right", "value"), losses, strict=True))


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(size, 24)).astype(np.float32),
        "left": rng.integers(0, 8, size).astype(np.int32),
        "right": rng.integers(0, 8, size).astype(np.int32),
        "value": rng.normal(size=size).astype(np.float32),
    }
