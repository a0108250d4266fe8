"""Measurements on the devices present: how long a matmul, a pass over memory and each collective take, by size.

A program does each several times over where it is short, for calling a program takes longer than most of what is in
it. Every call is waited for: XLA's simulated CPU devices can starve each other when calls pile up.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from spanax.hardware.collectives import Collective

MATMUL_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
COLLECTIVE_BYTES = tuple(4096 * 8**power for power in range(7))
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
JAX_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KERNELS = 64
"""How many small kernels one program starts, to see what starting one takes."""

WORK_SIZE = 256
"""The matmul beside which a collective is started: as long as what a step does between two of them."""

PROGRAM_SECONDS, MAX_TIMES = 5e-3, 16
"""Short operations repeat in a program until they take about this long, up to a maximum count."""


@dataclass(frozen=True)
class Collected:
    """One collective as it was measured: `num_bytes` as `collectives` counts them, over groups of `size` devices."""

    kind: Collective
    size: int
    num_bytes: int
    seconds: float


def matmul_rates(devices: Sequence[Any], dtype: str, seconds: float) -> dict[int, float]:
    """Operations a second of one device by size of a square matmul, all devices at work at once."""
    end, rates, took = time.monotonic() + seconds, {}, 0.0
    call_seconds = dispatch_seconds(devices)
    for size in MATMUL_SIZES:
        values = _on_each(devices, (size, size), JAX_DTYPES[dtype])
        times = _times(8 * took)
        took = program_seconds(lambda x: x @ x, values, times, until=end, call_seconds=call_seconds)
        rates[size] = 2 * size**3 / took
        if time.monotonic() + 8 * took * 5 * times > end:
            break
    return rates


def memory_rate(devices: Sequence[Any], num_bytes: int, seconds: float) -> float:
    """Bytes a second that one device reads and writes, all devices at work at once."""
    values, end = _on_each(devices, (num_bytes // 4,), "float32"), time.monotonic() + seconds
    call_seconds = dispatch_seconds(devices)
    return 2 * num_bytes / program_seconds(lambda x: x + 1, values, 1, until=end, call_seconds=call_seconds)


def kernel_start_seconds(devices: Sequence[Any], seconds: float) -> float:
    """Measures the seconds of one of many small matmuls in a program, on one device."""
    values, end = _on_each(devices[:1], (8, 8), "float32"), time.monotonic() + seconds
    call_seconds = dispatch_seconds(devices[:1])
    return program_seconds(lambda x: x @ x, values, KERNELS, until=end, call_seconds=call_seconds)


def collected(groups: Sequence[Sequence[Any]], limit_bytes: int, seconds: float) -> Iterator[Collected]:
    """Each collective by size, in all groups of devices at once; `limit_bytes` bounds what one device holds of it."""
    size, end = len(groups[0]), time.monotonic() + seconds
    call_seconds = dispatch_seconds([device for group in groups for device in group])
    for number, kind in enumerate(COLLECTIVES):
        until = time.monotonic() + (end - time.monotonic()) / (len(COLLECTIVES) - number)
        took = 0.0
        for target_bytes in COLLECTIVE_BYTES:
            num_bytes = -(-target_bytes // (4 * size**2)) * 4 * size**2
            if num_bytes > limit_bytes:
                break
            times = _times(8 * took)
            body, mapped, values = _collective(kind, groups, num_bytes)
            took = program_seconds(body, values, times, until=until, call_seconds=call_seconds, mapped=mapped)
            yield Collected(kind, size, num_bytes, took)
            if time.monotonic() + 8 * took * 5 * times > until:
                break


def start_beside_work_seconds(devices: Sequence[Any], seconds: float) -> float:
    """Seconds that a small all_reduce adds to a matmul before it, all devices at work at once.

    Devices that share cores are done with the matmul one after the other, and the first waits for the last: a
    collective of nothing but collectives before it does not show that.
    """
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, PartitionSpec

    values, call_seconds = _on_each(devices, (WORK_SIZE, WORK_SIZE), "float32"), dispatch_seconds(devices)
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")

    def mapped(program: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def took(add: Callable[[Any], Any]) -> float:
        def body(x: Any) -> Any:
            x = x @ x
            return x + add(x[:, :1, :1])

        until = time.monotonic() + seconds / 2
        return program_seconds(body, values, MAX_TIMES, until=until, call_seconds=call_seconds, mapped=mapped)

    return took(lambda x: lax.psum(x, "x")) - took(lambda x: x)


def dispatch_seconds(devices: Sequence[Any]) -> float:
    """Seconds of calling a program that does next to nothing on these devices, and of waiting for it."""
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
    """Seconds of `body` in a program that does it `times` over, each on what the last one gave."""
    import jax

    def program(x: Any) -> Any:
        for _ in range(times):
            x = jax.lax.optimization_barrier(body(x))
        return x

    took = _median(jax.jit(mapped(program)), values, until=until)
    return max(took - call_seconds, took / 10) / times


def _times(seconds: float) -> int:
    return max(1, min(MAX_TIMES, int(PROGRAM_SECONDS / seconds))) if seconds else MAX_TIMES


def _median(call: Callable[[Any], Any], values: Any, *, until: float) -> float:
    """The median of 3 to 20 calls, each waited for, after one that compiles; as many as fit before `until`."""
    call(values).block_until_ready()
    took: list[float] = []
    while len(took) < 3 or len(took) < 20 and time.monotonic() + took[-1] < until:
        begun = time.perf_counter()
        call(values).block_until_ready()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def _on_each(devices: Sequence[Any], shape: tuple[int, ...], dtype: str) -> Any:
    """An array of zeros of that shape on every device, as one array with a first dim more."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    return jax.jit(lambda: jax.numpy.zeros((len(devices), *shape), dtype), out_shardings=sharding)()


def _collective(kind: Collective, groups: Sequence[Sequence[Any]], num_bytes: int) -> tuple[Any, Any, Any]:
    """A body that does the collective and gives what the next one takes; how to map it; and zeros to begin with."""
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    size = len(groups[0])
    num_elements = num_bytes // 4 // (size if kind == "all_gather" else 1)
    part = num_bytes // 4 // size

    def all_gather(x: Any) -> Any:
        # The next one's part, not its own: the compiler sees through gathering an array to take its own part.
        everything = lax.optimization_barrier(lax.all_gather(x, "x", tiled=True))
        return lax.dynamic_slice_in_dim(everything, (lax.axis_index("x") + 1) % size * part, part)

    def reduce_scatter(x: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(x, lax.psum_scatter(x, "x", tiled=True), 0, 0)

    bodies: dict[Collective, Callable[[Any], Any]] = {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": lambda x: lax.psum(x, "x"),
        "all_to_all": lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, "x", [(i, (i + 1) % size) for i in range(size)]),
    }
    mesh, spec = Mesh(np.array(groups), ("group", "x")), PartitionSpec(("group", "x"))
    total, sharding = math.prod(mesh.devices.shape) * num_elements, NamedSharding(mesh, spec)
    zeros = jax.jit(lambda: jax.numpy.zeros((total,), "float32"), out_shardings=sharding)()

    def mapped(program: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    return bodies[kind], mapped, zeros
