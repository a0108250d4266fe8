"""Arrays of NNX objects as a checkpoint stores them: also those that no mesh shards, and those that are not JAX's.

An array of a new NNX object is *uncommitted*: JAX moves it to the devices of the arrays that it is used with. It must
remain so when it is restored, because `jax.jit` refuses arrays that are committed to different devices.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from spanax.errors import ObjectsError
from spanax.step.donation import check_alive


def as_saved(values: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns values by path as arrays to save; in a group of processes, an array of each process is saved once.

    Raises:
      SpanaxError: a value is abstract or lost, or an array of each process differs between them.
    """
    for path, value in values.items():
        if isinstance(value, jax.ShapeDtypeStruct):
            raise ObjectsError(f"`{path}` has no values to save: its object is abstract.", fix="restore it first")
        check_alive(path, value)
    arrays = {path: value if isinstance(value, jax.Array) else jnp.asarray(value) for path, value in values.items()}
    of_process = {path: array for path, array in arrays.items() if _is_of_process(array)}
    _check_equal(of_process)
    return arrays | {path: _replicated(array) for path, array in of_process.items()}


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
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        is_array = isinstance(value, np.ndarray | np.generic)
        return np.asarray(array, value.dtype) if is_array else type(value)(array.item())
    is_committed = value.committed if isinstance(value, jax.Array) else value.sharding is not None
    if not value.shape and getattr(jax.typeof(value), "weak_type", False):
        array = jnp.asarray(array.addressable_data(0).item())  # a Python number has a weak type
        return jax.device_put(array, value.sharding) if is_committed else array
    if is_committed:
        return array if array.sharding == value.sharding else jax.device_put(array, value.sharding)
    return _of_words(array, jax.device_put(_words(array)))


def _is_of_process(value: Any) -> bool:
    """Returns whether a value is on devices of this process alone although there are several processes."""
    sharding = getattr(value, "sharding", None)
    return jax.process_count() > 1 and (sharding is None or sharding.is_fully_addressable)


def _sharding(value: Any) -> jax.sharding.Sharding:
    """Returns the sharding to read an array with: that of the value; replicated for a value of each process."""
    if _is_of_process(value):
        mesh = jax.make_mesh((jax.device_count(),), ("replicas",), axis_types=(jax.sharding.AxisType.Auto,))
        return jax.NamedSharding(mesh, jax.P())
    sharding: jax.sharding.Sharding | None = getattr(value, "sharding", None)
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if sharding is None else sharding


def _check_equal(arrays: Mapping[str, jax.Array]) -> None:
    """Raises if an array of each process differs between them; a collective if there is one."""
    if not arrays:
        return
    digests = np.array([zlib.crc32(_words(array).tobytes()) for array in arrays.values()], np.uint32)
    of_all = multihost_utils.process_allgather(digests)
    for path, is_equal in zip(arrays, (of_all == of_all[0]).all(axis=0), strict=True):
        if not is_equal:
            raise ObjectsError(
                f"`{path}` differs between processes, and a checkpoint stores it once.",
                fix="the same seed in every process, or an array that is sharded over all devices",
            )


def _replicated(array: jax.Array) -> jax.Array:
    words = _words(array)
    return _of_words(array, jax.make_array_from_callback(words.shape, _sharding(array), lambda index: words[index]))


def _is_key(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _words(array: jax.Array) -> np.ndarray:
    """Returns the values of an array; of random keys their words."""
    return np.asarray(jax.random.key_data(array) if _is_key(array) else array)


def _of_words(array: jax.Array, words: jax.Array) -> jax.Array:
    """Returns an array with the dtype of `array` and these words."""
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array)) if _is_key(array) else words
