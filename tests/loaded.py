"""What a folder holds: its bytes, and the model of the weights that were imported to it."""

import hashlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from spanax.models.workloads import load
from spanax.train.state.weights import Source


def digests(folder: Path) -> dict[str, str]:
    """What every file of a folder holds."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def imported(folder: Path) -> nnx.Module:
    """Our model with the weights of a folder, without the machinery around it."""
    graph, state = nnx.split(nnx.eval_shape(lambda: load(str(folder)).build(nnx.Rngs(0))))
    source = Source.of(folder)
    flat = nnx.to_flat_state(state)
    for path, variable in flat:
        paths = [".".join(map(str, path))]
        if paths[0] not in source.saved:
            first, *rest = map(str, path)
            paths = [".".join((first, str(number), *rest)) for number in range(variable.shape[0])]
        targets = {path: np.empty(variable.shape[len(paths) > 1 :], source.saved[path].split("[")[0]) for path in paths}
        arrays = [np.asarray(array, "float32") for array in source.read(targets).values()]
        variable.set_value(jnp.stack(arrays) if len(paths) > 1 else jnp.asarray(arrays[0]))
    return nnx.merge(graph, nnx.from_flat_state(flat))
