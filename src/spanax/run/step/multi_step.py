"""Several: many steps in one call, for models whose step takes less time than the host takes to ask for it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

Step = Callable[..., tuple[list[Any], list[Any]]]
"""State, batch and limits to the state after it, and what it returned."""


def multi_step(step: Step, state: Sequence[NamedSharding], batch: Sequence[NamedSharding]) -> Step:
    """One step, as a function of a list of batches: what each step returned comes stacked, of shape [steps, ...].

    Args:
      step: the step.
      state: where its state lies.
      batch: where a batch lies.
    """

    def take(before: Sequence[Any], batches: Sequence[Sequence[Any]], *limits: Any) -> tuple[list[Any], list[Any]]:
        def turn(held: Sequence[Any], given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            after, returned = step(held, given, *limits)
            # Left open, the compiler may carry the state split otherwise, and move it at the end of every call.
            return [_kept(array, where) for array, where in zip(after, state, strict=True)], returned

        pairs = zip(zip(*batches, strict=True), batch, strict=True)
        stacked = [_kept(jnp.stack(arrays), _behind_steps(where)) for arrays, where in pairs]
        return jax.lax.scan(turn, list(before), stacked)

    return take


def _kept(array: Any, where: NamedSharding) -> Any:
    return array if where.mesh.size == 1 else jax.lax.with_sharding_constraint(array, where)


def _behind_steps(where: NamedSharding) -> NamedSharding:
    return NamedSharding(where.mesh, PartitionSpec(None, *where.spec))
