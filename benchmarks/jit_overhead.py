"""Measures the host time of a call of `spanax.jit` and of `nnx.jit`, next to `jax.jit` on a flat list of arrays.

Usage: python benchmarks/jit_overhead.py [number of leaves of the state] [rounds]

The step is one multiplication per array on one device, so the time is the dispatch by the host. Calls of the four
functions are interleaved; the figures are medians of the rounds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import spanax


class Pair(nnx.Module):
    """Two small arrays."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((2, 2)))
        self.bias = nnx.Param(jnp.ones(2))


class Model(nnx.Module):
    """A list of pairs of arrays."""

    def __init__(self, num_leaves: int) -> None:
        self.pairs = nnx.List([Pair() for _ in range(num_leaves // 2)])


def step(model: Model, x: Any) -> Any:
    """Halves every array of a model, and returns a number."""
    for pair in model.pairs:
        pair.kernel[...] *= 0.5
        pair.bias[...] *= 0.5
    return (x * model.pairs[0].bias[...]).sum()


def flat_step(arrays: list[Any], x: Any) -> tuple[list[Any], Any]:
    """Does the same for a list of arrays."""
    after = [array * 0.5 for array in arrays]
    return after, (x * after[0]).sum()


def calls(num_leaves: int) -> dict[str, Callable[[], Any]]:
    """Returns one call of each function, by name."""
    x = np.ones((8, 2), "float32")
    flat = [jnp.ones((2, 2)) if index % 2 else jnp.ones(2) for index in range(num_leaves)]
    jitted, state = jax.jit(flat_step, donate_argnums=0), [flat]

    def call_flat() -> Any:
        state[0], result = jitted(state[0], x)
        return result

    models = [Model(num_leaves) for _ in range(3)]
    sharded, plain = spanax.jit(step, mesh="data=1"), nnx.jit(step, donate_argnums=0)
    cached = nnx.cached_partial(nnx.jit(step), models[2])
    return {
        "jax.jit, flat": call_flat,
        "spanax.jit": lambda: sharded(models[0], x),
        "nnx.jit": lambda: plain(models[1], x),
        "nnx.cached_partial": lambda: cached(x),
    }


def main(num_leaves: int, rounds: int) -> None:
    """Prints a table of the host time per call."""
    functions = calls(num_leaves)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for index in range(rounds + 3):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            if index >= 3:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    base = medians["jax.jit, flat"]
    print(f"{num_leaves} leaves, jax {jax.__version__}, {rounds} interleaved rounds")
    for name, median in medians.items():
        extra = (median - base) / num_leaves
        print(f"{name:20} {median * 1e3:8.2f} ms  {median / base:5.2f}x  {extra * 1e6:+6.2f} us per leaf over jax.jit")


if __name__ == "__main__":
    main(*(int(argument) for argument in (sys.argv[1:] + ["2300", "20"][len(sys.argv) - 1 :])))
