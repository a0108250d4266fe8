"""Where the parameters and the sequences of a generation are."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spanax.decoding.decoder import called
from spanax.errors import IndivisibleError
from spanax.jit.jit import jit


@dataclass(frozen=True)
class Rows:
    """The placement of a generation; without a mesh, the parameters stay where they are.

    Attributes:
      mesh: the devices.
      axes: the mesh axes over which sequences are sharded.
      specs: the sharding of each parameter.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    specs: tuple[PartitionSpec, ...] = ()

    @classmethod
    def of(cls, model: Any, function: Callable[..., Any] | None, shape: tuple[int, int], **options: Any) -> "Rows":
        """Returns the placement of a forward pass under options of `spanax.jit`.

        Parameters are gathered once over the axes of the sequences, since every token reads them.

        Args:
          model: the model.
          function: as in `spanax.decode`.
          shape: the number of sequences, and of tokens.
          **options: `layout`, `mesh` and `like`; None for those that are not given.

        Raises:
          SpanaxError: the sequences do not divide into shards, or the options are invalid.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if not given:
            return cls()
        forward = jit(function or called, **given)
        # Planned for so many sequences that every mesh axis divides them: whether these do is checked here.
        count = math.lcm(shape[0], len(jax.devices()))
        plan = forward.prepare(model, jax.ShapeDtypeStruct((count, shape[1]), "int32"))
        axes = tuple(plan.batch[0].spec[0])
        ways = plan.mesh.ways(axes)
        if shape[0] % ways:
            raise IndivisibleError(
                f"{shape[0]} generations do not divide into {ways} shards over {', '.join(axes)}.",
                fix=f"a multiple of {ways} prompts times num_samples, or another mesh",
                axis=axes[0],
            )
        specs = [[tuple(axis for axis in by if axis not in axes) or None for by in leaf.spec] for leaf in plan.leaves]
        return cls(forward.placement.mesh, axes, tuple(PartitionSpec(*spec) for spec in specs))

    def parameters(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the parameters where they are read."""
        if self.mesh is None:
            return list(arrays)
        pairs = zip(arrays, self.specs, strict=True)
        return [jax.device_put(array, NamedSharding(self.mesh, spec)) for array, spec in pairs]

    def placed(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns arrays with the sequences along dim 0, sharded."""
        if self.mesh is None:
            return [jnp.asarray(array) for array in arrays]
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes or None))
        return [jax.device_put(array, sharding) for array in arrays]

    def constrained(self, cache: dict[int, Any]) -> dict[int, Any]:
        """Returns a cache with its sequences sharded; the compiler shards other dims as those of the parameters."""
        if self.mesh is None:
            return cache
        result = {}
        for value, array in cache.items():
            spec = PartitionSpec(self.axes or None, *[PartitionSpec.UNCONSTRAINED] * (array.ndim - 1))
            result[value] = jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))
        return result
