"""Arrays of NNX objects as a checkpoint stores them: also those that no mesh shards, and those that are not JAX's.

An array of a new NNX object is *uncommitted*: JAX moves it to the devices of the arrays that it is used with. It must
remain so when it is restored, because `jax.jit` refuses arrays that are committed to different devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_saved(value: Any) -> jax.Array:
    """Returns a value as an array to save; in a group of processes an array of each process is saved once."""
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    return jax.device_put(array, _sharding(array)) if _is_of_process(array) else array


def target_of(value: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, the dtype and the sharding to read an array with, given the value that it replaces."""
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_sharding(value))


def like(value: Any, array: jax.Array) -> Any:
    """Returns an array that was read with `target_of(value)` as a value like `value`.

    It is committed to devices only if `value` is, weakly typed if `value` is, and a NumPy array or a number if `value`
    is.

    Example:
      >>> like(jnp.zeros(2), jax.device_put(np.ones(2, "float32"), jax.devices()[0])).committed, like(1.5, jnp.ones(()))
      (False, 1.0)
    """
    if _is_of_process(value):
        array = array.addressable_data(0)
    if not isinstance(value, jax.Array):
        is_array = isinstance(value, np.ndarray | np.generic)
        return np.asarray(array, value.dtype) if is_array else type(value)(array.item())
    if not value.shape and getattr(jax.typeof(value), "weak_type", False):
        array = jnp.asarray(array.addressable_data(0).item())  # a Python number has a weak type
        return jax.device_put(array, value.sharding) if value.committed else array
    if value.committed:
        return array if array.sharding == value.sharding else jax.device_put(array, value.sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(array))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    return jax.device_put(np.asarray(array))


def _is_of_process(value: Any) -> bool:
    """Returns whether a value is on devices of this process alone although there are several processes."""
    return jax.process_count() > 1 and not (isinstance(value, jax.Array) and not value.is_fully_addressable)


def _sharding(value: Any) -> jax.sharding.Sharding:
    """Returns the sharding to read an array with: that of the value; replicated for a value of each process."""
    if _is_of_process(value):
        mesh = jax.make_mesh((jax.device_count(),), ("replicas",), axis_types=(jax.sharding.AxisType.Auto,))
        return jax.NamedSharding(mesh, jax.P())
    if isinstance(value, jax.Array):
        return value.sharding
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
