"""Provides a barrier between compilation and execution: no process runs a program before all have compiled it."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import jax

from spanax.processes.lockstep import in_lockstep, operation

_NUMBERS = count()

BARRIER_SECONDS = 3600
"""How long processes wait for others to compile; the coordinator reports a process that died much earlier."""


def compiled_with_barrier(
    function: Any,
    arguments: Sequence[Any],
    platform: str | None,
    name: str = "step",
    batch: Sequence[Any] = (),
    *,
    is_eager: bool = False,
) -> Any:
    """Returns the jitted function, compiled after a barrier if several processes run on CPUs.

    Gloo connects the devices of a collective on first use and gives up after 30 s, so all processes must compile first.
    Every process calls this for the same programs in the same order, and then the results.

    Args:
      function: the result of `jax.jit`.
      arguments: its abstract arguments.
      platform: the platform it runs on.
      name: the name of the function, for errors between processes.
      batch: its arguments besides the state, for these errors.
      is_eager: whether to compile in a single process, too.

    Example:
      >>> compiled_with_barrier(jax.jit(abs), [jax.ShapeDtypeStruct((), "float32")], "cpu")(-2.0).item()
      2.0
    """
    is_alone = jax.process_count() == 1
    compiles = is_eager or (platform == "cpu" and not is_alone)  # else in the first call, and again for other shardings
    compiled = function.lower(*arguments).compile() if compiles else function
    if is_alone:
        return compiled
    shapes = ", ".join(f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in batch)
    described = f"`{name}` of {shapes}"[:200] if shapes else f"`{name}`"
    if platform == "cpu":
        from jax._src import distributed  # the public barrier is a collective itself

        with operation(f"the compilation of {described}"):
            distributed.global_state.client.wait_at_barrier(f"spanax:compiled {next(_NUMBERS)}", BARRIER_SECONDS * 1000)
    return in_lockstep(compiled, described)
