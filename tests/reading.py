"""Models whose errors name the line: a build that reads a parameter, and a convolution of two dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def build(rngs: nnx.Rngs) -> nnx.Linear:
    model = nnx.Linear(4, 2, rngs=rngs)
    model.bound = float(np.asarray(model.kernel[...]).max())  # type: ignore[attr-defined]
    return model


class Masked(nnx.Module):
    """A convolution whose mask is state that is not trained."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.mask = nnx.Variable(jnp.ones((3, 3, 1, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.conv(x, (self.conv.kernel[...] * self.mask[...]).transpose(3, 2, 0, 1), (1, 1), "SAME")
