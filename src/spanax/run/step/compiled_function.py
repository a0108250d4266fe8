"""A function of NNX objects and arrays, compiled under a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from spanax.hardware.flags import for_platform
from spanax.plan.plan import Plan
from spanax.run.step.platform import platform_of
from spanax.run.step.replay.sharded_function import sharded_function
from spanax.trace.program import Program
from spanax.trace.user_mesh import sharding_on


@dataclass(frozen=True, eq=False)
class CompiledFunction:
    """A traced function of a state and a batch, replayed on the mesh of a plan.

    Attributes:
      program: the traced function.
      plan: its plan; without a pipeline.
      mesh: the devices.
      state: the sharding of every leaf of the state, which may differ from the plan's.
      donate: whether the buffers of the leaves that the function updates are reused.
      user_mesh: the user's Explicit mesh of the same devices, if any. Between calls, arrays are on it where possible:
        under `jax.set_mesh`, JAX accepts arrays on no other mesh.
      options: the user's options of the compiler, which take precedence over the plan's.
    """

    program: Program
    plan: Plan
    mesh: jax.sharding.Mesh
    state: tuple[jax.sharding.Sharding, ...]
    donate: bool
    user_mesh: jax.sharding.Mesh | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """The indices of the leaves that the function updates."""
        body = self.program.step.graph.body
        return tuple(
            index
            for index, (before, after) in enumerate(zip(body.inputs[: len(self.state)], body.outputs, strict=False))
            if before != after
        )

    @cached_property
    def constant(self) -> tuple[int, ...]:
        """The indices of the leaves that the function only reads."""
        return tuple(sorted({*range(len(self.state))}.difference(self.updated)))

    @cached_property
    def stored(self) -> tuple[jax.sharding.Sharding, ...]:
        """The sharding of every leaf of the state between calls."""
        return tuple(sharding_on(sharding, self.user_mesh) for sharding in self.state)

    @cached_property
    def batch(self) -> list[jax.sharding.NamedSharding]:
        """The sharding of every leaf of the batch."""
        return [placement.sharding(self.mesh) for placement in self.plan.batch]

    @property
    def is_simulated(self) -> bool:
        """Whether the mesh has several devices on CPUs, whose collectives require that calls do not overlap."""
        return self.mesh.size > 1 and platform_of(self.mesh) == "cpu"

    def outputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the new state and the results, under the plan's constraints, given state and batch."""
        program = self.program
        replay = sharded_function(
            program, self.plan, self.mesh, None, program.step, None, is_step=True, inputs_only=False
        )
        return replay.body(replay.graph.body, inputs)

    @cached_property
    def jitted(self) -> Any:
        """The jitted function from (updated leaves, constant leaves, batch) to (updated leaves, results)."""
        updated, constant, num_leaves = self.updated, self.constant, len(self.state)

        def function(before: Sequence[Any], read: Sequence[Any], batch: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            state = dict(zip(updated, before, strict=True)) | dict(zip(constant, read, strict=True))
            outputs = self.outputs([*(state[index] for index in range(num_leaves)), *batch])
            return [outputs[index] for index in updated], outputs[num_leaves:]

        platform = platform_of(self.mesh)
        planned = for_platform(self.plan.xla_flags, platform) if platform else {}
        before, read = ([self.state[index] for index in indices] for indices in (updated, constant))
        return jax.jit(
            function,
            in_shardings=(before, read, self.batch),
            out_shardings=([self.stored[index] for index in updated], None),
            donate_argnums=0 if self.donate else (),
            compiler_options={**planned, **self.options} or None,
        )

    def arguments(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the abstract arguments of `jitted`."""
        state = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.program.leaves, self.state, strict=True)
        ]
        batch = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.program.batch, self.batch, strict=True)
        ]
        return [state[index] for index in self.updated], [state[index] for index in self.constant], batch
