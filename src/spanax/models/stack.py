"""Equal layers stacked along a leading dim and run in one loop: compile time does not grow with depth."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def stacked(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """One module that holds `num_layers` of them: every array has a leading dim, and every layer its own numbers.

    Example:
      >>> layers = stacked(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 3, nnx.Rngs(0))
      >>> layers.kernel.shape
      (3, 4, 4)
    """
    return nnx.split_rngs(splits=num_layers)(nnx.vmap(make))(rngs)


def run_stack(layers: nnx.Module, carry: Any, *, remat: bool = False) -> Any:
    """What the layers make of a value, the first layer first; layers keep no state of their own.

    Args:
      layers: what `stacked` returned.
      carry: what the first layer takes; a layer returns the same shapes.
      remat: compute each layer again in the backward pass, instead of keeping what it computed.

    Example:
      >>> layers = stacked(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 3, nnx.Rngs(0))
      >>> run_stack(layers, jax.numpy.ones((2, 4))).shape
      (2, 4)
    """
    graph, state = nnx.split(layers)

    def body(carry: Any, layer: Any) -> tuple[Any, None]:
        return nnx.merge(graph, layer)(carry), None

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)  # inside a loop there is nothing to merge the replay with
    return jax.lax.scan(body, carry, state)[0]
