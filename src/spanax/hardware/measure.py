"""Benchmarks of matmuls, memory and collectives by size, on the local devices.

A short operation is repeated within a program, since the dispatch of a program takes longer than most operations.
Each call is blocked on: XLA's simulated CPU devices can starve each other when calls are queued.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from spanax.hardware.collectives import Collective

MATMUL_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
COLLECTIVE_BYTES = tuple(4096 * 8**power for power in range(7))
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
JAX_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KERNELS = 64
"""The number of small kernels in the program that measures the overhead of a kernel launch."""

WORK_SIZE = 256
"""The size of the matmul before a collective, about as long as the compute between two collectives of a step."""

PROGRAM_SECONDS = 5e-3
MAX_TIMES = 16
"""The target duration of a program of repeated short operations, and the maximum number of repetitions."""


@dataclass(frozen=True)
class Collected:
    """A measurement of a collective over groups of `size` devices; `num_bytes` is defined as in `collectives`."""

    kind: Collective
    size: int
    num_bytes: int
    seconds: float


def matmul_rates(devices: Sequence[Any], dtype: str, seconds: float) -> dict[int, float]:
    """Measures the FLOP/s per device by size of a square matmul, with all devices active."""
    end = time.monotonic() + seconds
    rates = {}
    op_seconds = 0.0
    call_seconds = dispatch_seconds(devices)
    for size in MATMUL_SIZES:
        values = _on_each(devices, (size, size), JAX_DTYPES[dtype])
        times = _times(8 * op_seconds)
        op_seconds = program_seconds(lambda x: x @ x, values, times, until=end, call_seconds=call_seconds)
        rates[size] = 2 * size**3 / op_seconds
        if time.monotonic() + 8 * op_seconds * 5 * times > end:
            break
    return rates


def memory_rate(devices: Sequence[Any], num_bytes: int, seconds: float) -> float:
    """Measures the bytes per second that each device reads and writes, with all devices active."""
    values = _on_each(devices, (num_bytes // 4,), "float32")
    end = time.monotonic() + seconds
    call_seconds = dispatch_seconds(devices)
    return 2 * num_bytes / program_seconds(lambda x: x + 1, values, 1, until=end, call_seconds=call_seconds)


def kernel_start_seconds(devices: Sequence[Any], seconds: float) -> float:
    """Measures the seconds per small matmul in a program of many, on one device."""
    values = _on_each(devices[:1], (8, 8), "float32")
    end = time.monotonic() + seconds
    call_seconds = dispatch_seconds(devices[:1])
    return program_seconds(lambda x: x @ x, values, KERNELS, until=end, call_seconds=call_seconds)


def collected(groups: Sequence[Sequence[Any]], limit_bytes: int, seconds: float) -> Iterator[Collected]:
    """Measures each collective by size in all groups concurrently, with up to `limit_bytes` per device."""
    size = len(groups[0])
    end = time.monotonic() + seconds
    call_seconds = dispatch_seconds([device for group in groups for device in group])
    for number, kind in enumerate(COLLECTIVES):
        until = time.monotonic() + (end - time.monotonic()) / (len(COLLECTIVES) - number)
        op_seconds = 0.0
        for target_bytes in COLLECTIVE_BYTES:
            num_bytes = -(-target_bytes // (4 * size**2)) * 4 * size**2
            if num_bytes > limit_bytes:
                break
            times = _times(8 * op_seconds)
            body, mapped, values = _collective(kind, groups, num_bytes)
            op_seconds = program_seconds(body, values, times, until=until, call_seconds=call_seconds, mapped=mapped)
            yield Collected(kind, size, num_bytes, op_seconds)
            if time.monotonic() + 8 * op_seconds * 5 * times > until:
                break


def start_after_matmul_seconds(devices: Sequence[Any], seconds: float) -> float:
    """Measures the seconds that a small all_reduce adds to a preceding matmul, with all devices active.

    Devices that share cores finish the matmul one after another, and the first waits for the last. A program of only
    collectives does not include this wait.
    """
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, PartitionSpec

    values = _on_each(devices, (WORK_SIZE, WORK_SIZE), "float32")
    call_seconds = dispatch_seconds(devices)
    mesh = Mesh(np.array(devices), ("x",))
    spec = PartitionSpec("x")
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def measure(add: Callable[[Any], Any]) -> float:
        def body(x: Any) -> Any:
            x = x @ x
            return x + add(x[:, :1, :1])

        until = time.monotonic() + seconds / 2
        return program_seconds(body, values, MAX_TIMES, until=until, call_seconds=call_seconds, mapped=mapped)

    return measure(lambda x: lax.psum(x, "x")) - measure(lambda x: x)


def dispatch_seconds(devices: Sequence[Any]) -> float:
    """Measures the seconds of dispatching a trivial program to the devices and blocking on its result."""
    import jax

    return _median(jax.jit(lambda x: x + 1), _on_each(devices, (1,), "float32"), until=time.monotonic() + 0.1)


def program_seconds(
    body: Callable[[Any], Any],
    values: Any,
    times: int,
    *,
    until: float,
    call_seconds: float,
    mapped: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = lambda program: program,
) -> float:
    """Measures the seconds of `body` in a program that applies it `times` times in sequence."""
    import jax

    def program(x: Any) -> Any:
        for _ in range(times):
            x = jax.lax.optimization_barrier(body(x))
        return x

    total_seconds = _median(jax.jit(mapped(program)), values, until=until)
    return max(total_seconds - call_seconds, total_seconds / 10) / times


def _times(seconds: float) -> int:
    return max(1, min(MAX_TIMES, int(PROGRAM_SECONDS / seconds))) if seconds else MAX_TIMES


def _median(call: Callable[[Any], Any], values: Any, *, until: float) -> float:
    """Returns the median seconds of 3 to 20 blocking calls before `until`, after one that compiles."""
    call(values).block_until_ready()
    durations: list[float] = []
    while len(durations) < 3 or len(durations) < 20 and time.monotonic() + durations[-1] < until:
        start = time.perf_counter()
        call(values).block_until_ready()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def _on_each(devices: Sequence[Any], shape: tuple[int, ...], dtype: str) -> Any:
    """Returns zeros of `shape` on every device, as an array sharded over an additional leading dim."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    return jax.jit(lambda: jax.numpy.zeros((len(devices), *shape), dtype), out_shardings=sharding)()


def _collective(kind: Collective, groups: Sequence[Sequence[Any]], num_bytes: int) -> tuple[Any, Any, Any]:
    """Returns a body that maps an array to one of the same shape, its `shard_map`, and the initial zeros."""
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    size = len(groups[0])
    num_elements = num_bytes // 4 // (size if kind == "all_gather" else 1)
    part = num_bytes // 4 // size

    def all_gather(x: Any) -> Any:
        # The part of the next device: XLA simplifies an all-gather followed by a slice of the device's own part.
        gathered = lax.optimization_barrier(lax.all_gather(x, "x", tiled=True))
        return lax.dynamic_slice_in_dim(gathered, (lax.axis_index("x") + 1) % size * part, part)

    def reduce_scatter(x: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(x, lax.psum_scatter(x, "x", tiled=True), 0, 0)

    bodies: dict[Collective, Callable[[Any], Any]] = {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": lambda x: lax.psum(x, "x"),
        "all_to_all": lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, "x", [(i, (i + 1) % size) for i in range(size)]),
    }
    mesh = Mesh(np.array(groups), ("group", "x"))
    spec = PartitionSpec(("group", "x"))
    total = math.prod(mesh.devices.shape) * num_elements
    sharding = NamedSharding(mesh, spec)
    zeros = jax.jit(lambda: jax.numpy.zeros((total,), "float32"), out_shardings=sharding)()
    return bodies[kind], partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), zeros
