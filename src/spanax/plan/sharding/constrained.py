"""`Plan.constrain`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
