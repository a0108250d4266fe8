"""A function of NNX objects and arrays, compiled under a plan, and the notice if XLA ends the process meanwhile."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from spanax.errors import CompilerError
from spanax.hardware.flags import for_platform
from spanax.plan.plan import Plan
from spanax.step.placement import platform_of
from spanax.step.replay.callbacks import is_callback
from spanax.step.train_step import PlacedProgram
from spanax.trace.user_mesh import sharding_on

SCRIPT = 'read -r ended || printf "%s\\n" "$1" >&2'


@dataclass(frozen=True, eq=False)
class CompiledFunction(PlacedProgram):
    """A traced function of a state and a batch, replayed on the mesh of a plan without a pipeline.

    Attributes:
      donate: whether the buffers of the leaves that the function updates are reused.
      user_mesh: the user's Explicit mesh of the same devices, if any. Between calls, arrays are on it where possible:
        under `jax.set_mesh`, JAX accepts arrays on no other mesh.
      options: the user's options of the compiler, which take precedence over the plan's.
    """

    donate: bool
    user_mesh: jax.sharding.Mesh | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """The indices of the leaves that the function updates."""
        pairs = enumerate(self.program.step.updated)
        return tuple(index for index, (before, after) in pairs if before != after)

    @cached_property
    def donated(self) -> tuple[int, ...]:
        """The indices of the leaves whose buffers are reused; those of random keys may be those of their data."""
        keys = {index for index, placement in enumerate(self.plan.leaves) if placement.is_key}
        return tuple(index for index in self.updated if self.donate and index not in keys)

    @cached_property
    def read(self) -> tuple[int, ...]:
        """The indices of the other leaves."""
        return tuple(sorted({*range(len(self.state))}.difference(self.donated)))

    @cached_property
    def has_callbacks(self) -> bool:
        """Whether the function calls Python functions while it runs, which may raise."""
        return any(map(is_callback, self.program.step.graph.ops()))

    @cached_property
    def stored(self) -> tuple[jax.sharding.Sharding, ...]:
        """The sharding of every leaf of the state between calls."""
        return tuple(sharding_on(sharding, self.user_mesh) for sharding in self.state)

    def outputs(self, inputs: Sequence[Any], *, defers_errors: bool = False) -> list[Any]:
        """Returns the new state and the results, under the plan's constraints, given state and batch."""
        replay = replace(self.replay(self.program.step, is_step=True), defers_errors=defers_errors)
        return replay.body(replay.graph.body, inputs)

    @cached_property
    def jitted(self) -> Any:
        """The jitted function from (donated leaves, other leaves, batch) to (updated leaves, results)."""
        indices = (*self.donated, *self.read)
        num_leaves = len(self.state)

        def function(before: Sequence[Any], read: Sequence[Any], batch: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            state = dict(zip(indices, [*before, *read], strict=True))
            inputs = [*(state[index] for index in range(num_leaves)), *batch]
            outputs = self.outputs(inputs, defers_errors=self.is_simulated)
            return [outputs[index] for index in self.updated], outputs[num_leaves:]

        platform = platform_of(self.mesh)
        planned = for_platform(self.plan.xla_flags, platform) if platform else {}
        before, read = ([self.state[index] for index in indices] for indices in (self.donated, self.read))
        after = [self.stored[index] for index in self.updated]
        return jax.jit(
            function,
            in_shardings=(before, read, self.batch),
            out_shardings=(after, None),
            donate_argnums=0,
            compiler_options={**planned, **self.options} or None,
        )

    def arguments(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the abstract arguments of `jitted`."""
        state, batch = self.abstract
        return [state[index] for index in self.donated], [state[index] for index in self.read], batch


@contextmanager
def compile_notice(name: str, plan: Plan) -> Iterator[None]:
    """Prints an error if the process ends within the `with` statement.

    Args:
      name: what is compiled.
      plan: the plan that it is compiled for.
    """
    shell = shutil.which("sh") if plan.mesh.size > 1 else None
    if shell is None:
        yield
        return
    error = CompilerError(
        f"the process ended while XLA compiled {name}.",
        where=f"layout {plan.title}, jax {jax.__version__}; XLA's own error is above",
        fix="JAX_USE_SHARDY_PARTITIONER=0, which selects another partitioner of XLA; or another layout",
    )
    command = [shell, "-c", SCRIPT, shell, str(error)]
    # In a session of its own: Ctrl-C must not end the shell before the process.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield
        finally:
            assert watcher.stdin is not None
            with suppress(BrokenPipeError):
                watcher.stdin.write(b"ended\n")
                watcher.stdin.flush()
