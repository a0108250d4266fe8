"""A barrier between compiling a step and running it: no process runs it before all have compiled it."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import jax

_NUMBERS = count()

BARRIER_SECONDS = 3600
"""How long processes wait for those that compile; the coordinator tells of a process that died much earlier."""


def compiled_with_barrier(function: Any, arguments: Sequence[Any], platform: str | None) -> Any:
    """What `jax.jit` returned or, in a group of processes on CPUs, its program once every process has compiled it.

    Gloo connects the devices of a collective when it first runs, and gives up after 30 s. Every process calls this for
    the same programs in the same order.

    Args:
      function: what `jax.jit` returned.
      arguments: what it is called with, without numbers.
      platform: what it runs on.

    Example:
      >>> compiled_with_barrier(jax.jit(abs), [jax.ShapeDtypeStruct((), "float32")], "cpu")(-2.0).item()
      2.0
    """
    if jax.process_count() == 1 or platform != "cpu":
        return function
    from jax._src import distributed  # the public barrier is a collective itself

    compiled = function.lower(*arguments).compile()
    distributed.global_state.client.wait_at_barrier(f"spanax:compiled {next(_NUMBERS)}", BARRIER_SECONDS * 1000)
    return compiled
