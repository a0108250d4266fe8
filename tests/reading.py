"""A build that reads the value of a parameter; the error names its line."""

import numpy as np
from flax import nnx


def build(rngs: nnx.Rngs) -> nnx.Linear:
    model = nnx.Linear(4, 2, rngs=rngs)
    model.bound = float(np.asarray(model.kernel[...]).max())  # type: ignore[attr-defined]
    return model
