"""Where the parameters, the caches and the sequences of a generation are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spanax.decoding.derive.fill import Cache
from spanax.decoding.derive.sequences import Incremental, Recomputation
from spanax.decoding.programs import arrays_of, step_arguments
from spanax.errors import IndivisibleError
from spanax.jit.jit import jit
from spanax.plan.advice.generation import are_gathered
from spanax.plan.sharding.resolve import Spec, axes_of


@dataclass(frozen=True)
class Rows:
    """The placement of a generation, that of its decode step; without a mesh, the parameters stay where they are.

    Attributes:
      mesh: the devices.
      axes: the mesh axes over which sequences are sharded.
      parameter_specs: the sharding of each parameter.
      cache_specs: that of each cache, with its value of the forward pass.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    parameter_specs: tuple[PartitionSpec, ...] = ()
    cache_specs: tuple[tuple[int, PartitionSpec], ...] = ()

    @classmethod
    def of(cls, model: Any, derived: Incremental | Recomputation, num_sequences: int, **options: Any) -> "Rows":
        """Returns the placement of a decode step under options of `spanax.jit`.

        Parameters are gathered once over the axes of the sequences, since every token reads them; if they fit
        (`are_gathered`).

        Args:
          model: the model.
          derived: the form of its forward pass.
          num_sequences: the sequences that generate together.
          **options: `layout`, `mesh` and `like`; None for those that are not given.

        Raises:
          SpanaxError: the sequences do not divide into shards, or the options are invalid.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if not given:
            return cls()
        # Planned for so many sequences that every mesh axis divides them: whether these do is checked here.
        caches, arrays = step_arguments(derived, math.lcm(num_sequences, len(jax.devices())))

        def decode_step(model: Any, arrays: Sequence[Any], cached: Sequence[Any]) -> Any:
            *rows, positions = arrays
            logits, after = derived.step(arrays_of(model), dict(zip(caches, cached, strict=True)), rows, positions)
            return logits, [after[value] for value in caches]

        step = jit(decode_step, **given)
        plan = step.prepare(model, arrays, [*caches.values()])
        axes = tuple(plan.batch[0].spec[0])
        ways = plan.mesh.ways(axes)
        if num_sequences % ways:
            raise IndivisibleError(
                f"{num_sequences} generations do not divide into {ways} shards over {', '.join(axes)}.",
                fix=f"a multiple of {ways} prompts times num_samples, or another mesh",
                axis=axes[0],
            )
        parameters = plan.leaves
        kept = [tuple(tuple(axis for axis in by if axis not in axes) for by in leaf.spec) for leaf in parameters]
        num_bytes = sum(leaf.local_bytes * plan.mesh.ways(axes_of(leaf.spec) & {*axes}) for leaf in parameters)
        limit = step.placement.cluster().memory_bytes
        specs = kept if are_gathered(num_bytes, limit) else [leaf.spec for leaf in parameters]
        return cls(
            step.placement.mesh,
            axes,
            tuple(map(_partition_spec, specs)),
            tuple(
                (value, _partition_spec(leaf.spec))
                for value, leaf in zip(caches, plan.batch[len(arrays) :], strict=True)
            ),
        )

    def parameters(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the parameters where they are read."""
        if self.mesh is None:
            return list(arrays)
        pairs = zip(arrays, self.parameter_specs, strict=True)
        return [jax.device_put(array, NamedSharding(self.mesh, spec)) for array, spec in pairs]

    def placed(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns arrays with the sequences along dim 0, sharded."""
        if self.mesh is None:
            return [jnp.asarray(array) for array in arrays]
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes or None))
        return [jax.device_put(array, sharding) for array in arrays]

    def constrained(self, cache: Cache) -> Cache:
        """Returns a cache, sharded."""
        if self.mesh is None:
            return cache
        constraint = jax.lax.with_sharding_constraint
        return {value: constraint(cache[value], NamedSharding(self.mesh, spec)) for value, spec in self.cache_specs}


def _partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(by or None for by in spec))
