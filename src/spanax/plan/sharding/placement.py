"""Placement: the sharding of one array on a mesh, and the memory that stores it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spanax.plan.sharding.resolve import Spec
from spanax.trace.variables import Leaf

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

DEVICE = "device"
HOST = "pinned_host"
"""Memory kinds of arrays, as JAX names them."""


@dataclass(frozen=True)
class Placement:
    """The sharding of one array: a leaf of the state or of the batch.

    `axes` names each dim; `spec` lists the mesh axes that shard it; `reason` explains the sharding and names requests
    that were not possible. `memory_kind` is `device`, or `pinned_host` for offloaded state.

    Example:
      >>> place = Placement(
      ...     "up.kernel", (64, 256), "float32", "param", ("embed", "mlp"), ((), ("fsdp",)), (64, 32), 8192, ""
      ... )
      >>> tuple(place.partition_spec)
      (None, 'fsdp')
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    axes: tuple[str | None, ...]
    spec: Spec
    local_shape: tuple[int, ...]
    local_bytes: int
    reason: str
    memory_kind: str = DEVICE

    @property
    def is_key(self) -> bool:
        """Whether the elements are random keys (`jax.random.key`), stored as words in a trailing dim."""
        return self.dtype.startswith("key<")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return self.local_bytes // max(1, math.prod(self.local_shape))

    @property
    def partition_spec(self) -> "PartitionSpec":
        """The spec as a JAX `PartitionSpec`."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in self.spec))

    def sharding(self, mesh: "Mesh") -> "NamedSharding":
        """Returns the sharding on a JAX mesh, with the memory kind; equal placements share one object."""
        by_dim = self.spec
        while by_dim and not by_dim[-1]:
            by_dim = by_dim[:-1]
        return _shared_sharding(mesh, by_dim, self.memory_kind)


def is_offloaded(leaf: Leaf, offload: Sequence[str]) -> bool:
    """Returns whether a leaf is stored in host memory: an array of a kind in `offload`. Scalars and keys are not."""
    return leaf.kind in offload and leaf.shape != () and not str(leaf.dtype).startswith("key<")


@functools.lru_cache(maxsize=4096)
def _shared_sharding(mesh: "Mesh", spec: Spec, memory_kind: str) -> "NamedSharding":
    # At every step JAX compares the sharding of every array with the compiled one: by identity first, and by value, in
    # Python, for distinct objects.
    from jax.sharding import NamedSharding, PartitionSpec

    partition_spec = PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))
    return NamedSharding(mesh, partition_spec, memory_kind=None if memory_kind == DEVICE else memory_kind)


if TYPE_CHECKING:
    from jax.sharding import Mesh


def constrain(
    self: Any, function: Callable[..., Any], *, mesh: "Mesh | None" = None, devices: Sequence[Any] | None = None
) -> Callable[..., Any]:
    """Returns the function with the plan's sharding constraints applied, for your own `nnx.jit` or `jax.jit`.

    It has the arguments and results of `function`, and updates its NNX objects in place. Each call traces `function`
    on its arguments and adds its operations to the surrounding trace, under the constraints with which `spanax.jit`
    compiles it. Arguments without arrays or objects are static. The `xla_flags` of the plan are options of the
    compiler, and not part of the result.

    Args:
      function: the function that the plan was made for, or another function of its objects, such as an evaluation,
        which is sharded by the same layout.
      mesh: a mesh with the axes of the plan; by default, the plan's mesh on `devices`.
      devices: the devices of the mesh; the first of `jax.devices()` by default.

    Raises:
      SpanaxError: the mesh is not the plan's, or there are too few devices. A call raises it outside of a trace, or if
        the function cannot be sharded by the plan.

    Example:
      >>> import jax, spanax
      >>> from flax import nnx
      >>> def predict(model, x):
      ...     return model(x)
      >>> model, x = nnx.Linear(16, 32, rngs=nnx.Rngs(0)), jax.numpy.ones((8, 16))
      >>> plan = spanax.jit(predict, mesh="fsdp=8").prepare(model, x)
      >>> tuple(nnx.jit(plan.constrain(predict))(model, x).sharding.spec)[:1]
      ('fsdp',)
    """
    from spanax.jit.constrain import constrain

    return constrain(function, self, mesh=mesh, devices=devices)
