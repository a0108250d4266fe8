"""Runs several steps in one call, for models whose step takes less time than its dispatch from the host."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

Step = Callable[..., tuple[list[Any], list[Any]]]
"""Maps state, batch and limits to the next state and the outputs."""


def multi_step(step: Step, state: Sequence[NamedSharding], batch: Sequence[NamedSharding]) -> Step:
    """Returns a function that runs one step for each of a list of batches, and stacks outputs to shape [steps, ...].

    `state` and `batch` are the shardings of the arguments of `step`.
    """

    def take(initial: Sequence[Any], batches: Sequence[Sequence[Any]], *limits: Any) -> tuple[list[Any], list[Any]]:
        def body(state_arrays: Sequence[Any], batch_arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            after, returned = step(state_arrays, batch_arrays, *limits)
            # Without constraints XLA may carry the state under other shardings and reshard it at the end of every call.
            return [_constrained(array, sharding) for array, sharding in zip(after, state, strict=True)], returned

        pairs = zip(zip(*batches, strict=True), batch, strict=True)
        stacked = [_constrained(jnp.stack(arrays), _with_steps_dim(sharding)) for arrays, sharding in pairs]
        return jax.lax.scan(body, list(initial), stacked)

    return take


def _constrained(array: Any, sharding: NamedSharding) -> Any:
    return array if sharding.mesh.size == 1 else jax.lax.with_sharding_constraint(array, sharding)


def _with_steps_dim(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
