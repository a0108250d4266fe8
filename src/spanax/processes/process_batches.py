"""Turns the batches of a user's loader into global arrays, in a group of processes.

A loader yields the same global batch on every process, or only the rows of its process (`local_batch`). To confuse the
two trains on a part of the data, or on every row several times, so processes compare digests of their batches: of the
1st, 2nd, 4th, 8th, ... batch, and of each new shape. The comparison goes through JAX's coordinator.

Shapes: B examples in the global batch, R of them read by this process.
"""

import json
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from spanax.compat import coordination
from spanax.errors import BatchError, DeviceCountError, HostsError, first_line
from spanax.processes.lockstep import operation
from spanax.processes.processes import join_group
from spanax.sealed import digest

if TYPE_CHECKING:
    import jax

SAME = "same"
"""The verdict on processes that all have the same rows."""

AGREEMENT_SECONDS = 600
"""How long a process waits for the texts of the others: the first one may be evaluating or saving by itself."""

_NUMBERS = count()
_LOCAL_CALLS = count(1)
_GLOBAL_CALLS = count(1)
_agreed: set[str] = set()


def local_batch(batch: Any, sharding: "jax.sharding.Sharding | None" = None) -> Any:
    """Returns the global batch, as arrays on the devices, from the rows that each process passes.

    The rows are concatenated in the order of the processes: those of process p are rows p * R to (p + 1) * R of the
    global batch, on any mesh. A step that needs a row on the devices of another process moves it there. Without this
    function, a batch of NumPy arrays is the global batch, equal on every process. Every process must call this the same
    number of times, with batches of the same shapes.

    Args:
      batch: a pytree of arrays on the host, rows along dim 0: the rows of this process.
      sharding: the sharding of every array; by default dim 0 over all devices, which a step reshards as it needs.

    Raises:
      HostsError: this process belongs to a group and cannot join it, or the others do not call this.
      SpanaxError: an array has no rows, the shapes differ between processes, or all processes pass the same rows.

    Example:
      >>> import numpy as np
      >>> rows = {"x": np.zeros((8, 4), "float32")}
      >>> local_batch(rows)["x"].shape
      (8, 4)
    """
    join_group()
    import jax

    paths, treedef = jax.tree.flatten_with_path(batch)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "batch" for path, _ in paths]
    arrays = [_rows(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)]
    shapes = _described(names, arrays)
    number = next(_LOCAL_CALLS)
    if jax.process_count() > 1 and (_is_power_of_2(number) or shapes not in _agreed):
        _check_local(number, shapes, arrays)
        _agreed.add(shapes)
    return jax.tree.unflatten(treedef, [_concatenated(array, sharding) for array in arrays])


def global_batch(
    leaves: Sequence[Any], shardings: Sequence["jax.sharding.Sharding"], names: Sequence[str]
) -> list[Any]:
    """Returns the leaves of a global batch, with arrays on the host placed on the devices in a group of processes.

    Without a group they are returned unchanged, and transferred with the step. In a group `jax.jit` accepts no sharded
    arrays on the host, and nothing in JAX would notice that they differ.

    Raises:
      SpanaxError: the batch differs between processes.
    """
    import jax

    if jax.process_count() == 1 or all(isinstance(leaf, jax.Array) for leaf in leaves):
        return list(leaves)
    number = next(_GLOBAL_CALLS)
    on_host = [leaf for leaf in leaves if not isinstance(leaf, jax.Array)]
    if _is_power_of_2(number):
        text = json.dumps([f"batch {number}: {_described(names, leaves)}", _digest(on_host)])
        if difference := verdict(text, _judge_global):
            raise BatchError(
                "the global batch differs between processes.",
                where=difference,
                fix="read the same batch on every process, or pass each its rows: spanax.local_batch(batch)",
            )
    return [
        leaf if isinstance(leaf, jax.Array) else _placed(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def _placed(array: np.ndarray, sharding: "jax.sharding.Sharding") -> "jax.Array":
    import jax

    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index].astype(dtype), dtype=dtype)


def _rows(name: str, leaf: Any) -> np.ndarray:
    import jax

    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise BatchError(f"'{name}' is already a global array.", fix="pass it to the step without local_batch")
    array = np.asarray(leaf)
    array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if array.ndim == 0 or array.shape[0] == 0:
        raise BatchError(f"'{name}' has shape {array.shape}, and so no rows.", fix="arrays with rows along dim 0")
    return array


def _concatenated(rows: np.ndarray, sharding: "jax.sharding.Sharding | None") -> "jax.Array":
    """Returns the array with the rows of all processes in their order."""
    import jax

    array = jax.make_array_from_process_local_data(_by_process(len(rows)), rows)
    return array if sharding is None else jax.device_put(array, sharding)


def _by_process(num_rows_R: int) -> "jax.sharding.NamedSharding":
    """Returns a sharding with the rows of each process on its devices: sharded if their number divides R."""
    import jax

    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    num_processes = jax.process_count()
    if len(devices) % num_processes:
        raise DeviceCountError(f"{num_processes} processes have {len(devices)} devices: not the same number each.")
    mesh = jax.sharding.Mesh(np.array(devices).reshape(num_processes, -1), ("process", "device"))
    axes = ("process",) if num_rows_R % jax.local_device_count() else ("process", "device")
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes))


def _check_local(number: int, shapes: str, arrays: Sequence[np.ndarray]) -> None:
    # Constant arrays, as in a benchmark, are equal without being the same rows.
    is_constant = all(bool((array == array.flat[0]).all()) for array in arrays)
    what = f"batch {number}: {shapes}"
    difference = verdict(json.dumps([what, "" if is_constant else _digest(arrays)]), _judge_local)
    if difference == SAME:
        raise BatchError(
            "local_batch received the same rows on all processes.",
            where=what,
            fix="rows by spanax.distributed().process_index; a batch that is equal everywhere goes to the step itself",
        )
    if difference:
        raise BatchError(
            "the rows of a batch differ in shape between processes.",
            where=difference,
            fix="the same number of rows on every process, without a smaller last batch",
        )


def _judge_local(texts: Sequence[str]) -> str:
    shapes, digests = zip(*map(json.loads, texts), strict=True)
    if difference := _difference(shapes):
        return difference
    return SAME if len(texts) > 1 and len({*digests}) == 1 and digests[0] else ""


def _judge_global(texts: Sequence[str]) -> str:
    return _difference(["{} with digest {}".format(*json.loads(text)) for text in texts])


def _difference(texts: Sequence[str]) -> str:
    """Returns how the text of a process differs from that of process 0; empty if none does."""
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    return "" if other is None else f"process 0 has {texts[0]}; process {other} has {texts[other]}"


def _described(names: Sequence[str], arrays: Sequence[Any]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in zip(names, arrays, strict=True))


def _digest(arrays: Sequence[np.ndarray]) -> str:
    return digest(*(np.ascontiguousarray(array) for array in arrays))


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


def verdict(text: str, judge: Callable[[Sequence[str]], str]) -> str:
    """Returns what `judge` says about the texts of all processes, in their order; the same on every process.

    The first process reads all texts and writes the verdict, so that the traffic grows with the number of processes
    only. Every process calls this equally often.

    Raises:
      HostsError: a process did not send its text in time.

    Example:
      >>> verdict("a batch of 8", lambda texts: f"{len(texts)} processes")
      '1 processes'
    """
    state = coordination()
    if state.client is None or state.num_processes == 1:
        return judge([text])
    topic = f"spanax:agreement {next(_NUMBERS)}"
    state.client.key_value_set(f"{topic}/{state.process_id}", text)
    with operation("the comparison of a batch"):
        return _exchanged(state, topic, text, judge)


def _exchanged(state: Any, topic: str, text: str, judge: Callable[[Sequence[str]], str]) -> str:
    timeout_ms = AGREEMENT_SECONDS * 1000
    try:
        if state.process_id == 0:
            ranks = range(state.num_processes)
            texts = [state.client.blocking_key_value_get(f"{topic}/{rank}", timeout_ms) for rank in ranks]
            # The service has no empty values.
            state.client.key_value_set(f"{topic}/verdict", f"={judge(texts)}")
        return str(state.client.blocking_key_value_get(f"{topic}/verdict", timeout_ms))[1:]
    except RuntimeError as error:
        raise HostsError(
            f"the other processes did not compare their batches with this one within {AGREEMENT_SECONDS} s.",
            where=f"process {state.process_id}: {text[:200]}; {first_line(error)}",
            fix="call the same functions equally often, with batches of the same shapes, on every process",
        ) from None
