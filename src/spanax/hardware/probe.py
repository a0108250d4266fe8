"""Measurement of the local devices, as a cluster file that overrides the numbers of the catalog."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanax.errors import HardwareError, RangeError
from spanax.hardware.chip import Chip
from spanax.hardware.cluster import Cluster, local
from spanax.hardware.links import axis_link
from spanax.hardware.measure import (
    JAX_DTYPES,
    Collected,
    collected,
    kernel_start_seconds,
    matmul_rates,
    memory_rate,
    start_after_matmul_seconds,
)
from spanax.hardware.mesh import MeshShape
from spanax.processes.processes import join_group
from spanax.units import bytes_text, quantity_text

RINGS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Ring collective -> number of passes around the ring."""

PROBED_BYTES = 64 * 2**20
"""Bytes that each device reads and writes to measure memory bandwidth, at most a sixteenth of its memory."""


@dataclass(frozen=True)
class Fit:
    """A fitted link: seconds = start + steps x latency + bytes sent per device / rate, with mean relative `error`.

    Example:
      >>> times = {(n, b): 1e-5 + (n - 1) * (1e-6 + b / n / 1e9) for n in (2, 8) for b in (8, 10**6)}
      >>> fit = fitted([Collected("all_gather", n, b, seconds) for (n, b), seconds in times.items()])
      >>> round(fit.bytes_per_second / 1e9, 3), round(fit.latency_seconds * 1e6, 3), round(fit.start_seconds * 1e6, 3)
      (1.0, 1.0, 10.0)
    """

    bytes_per_second: float
    latency_seconds: float
    start_seconds: float
    error: float


def probe(devices: Sequence[Any] | None = None, *, seconds: float = 30.0) -> str:
    """Measures matmuls by size and dtype, memory bandwidth, kernel launches, and collectives by size.

    Takes about `seconds`; the smallest sizes are always measured. Measurements are in comments, fitted values in keys.

    Returns:
      The text of a cluster file, for `cluster("mine.toml")`. It overrides the measured numbers of a chip in the
      catalog.

    Raises:
      SpanaxError: `seconds` is not positive, or the memory of an unknown chip is unknown.

    Example:
      >>> import jax
      >>> text = probe(jax.devices()[:1], seconds=0.1)
      >>> 'like = "cpu"' in text, "matmul_share" in text
      (True, True)
    """
    import jax

    if not seconds > 0:
        raise RangeError(f"a probe of {seconds} seconds measures nothing.", fix="seconds=30")
    if devices is None:
        join_group()
    devices = list(jax.devices() if devices is None else devices)
    here = local(devices)
    known = bool(here.chip.peak_flops)
    if not known and here.memory_bytes is None:
        raise HardwareError(
            f"'{here.chip.name}' is not in the catalog, and its memory is unknown.",
            fix="write a cluster file by hand: docs/hardware.md",
        )
    source = f"probe of {len(devices)} x {here.chip.name}, jax {jax.__version__}, {datetime.date.today()}"
    node = here.devices_per_node
    lines = [f"# {source}", *_head(here, known)]
    lines += _compute(devices, here.chip, node, seconds * 0.3)
    lines += _memory(devices, here, node, seconds * 0.1)
    start = kernel_start_seconds(devices, seconds * 0.05)
    lines.append(f'kernel_start = "{quantity_text(max(start, 1e-9), "seconds")}"')
    groups = _groups(devices, here)
    for name, grouped in groups.items():
        parts = [
            point
            for part in grouped
            for point in collected(part, _limit(here), seconds * 0.45 / len(groups) / len(grouped))
        ]
        start_after_matmul = start_after_matmul_seconds(devices, seconds * 0.1) if here.chip.shared else 0.0
        lines += ["", f"[{name}]", *_link(here, name, parts, node, start_after_matmul)]
    return "\n".join([*lines, "", "[source]", *_sources(lines, source)]) + "\n"


def fitted(points: Sequence[Collected]) -> Fit:
    """Fits the start, latency and bandwidth of a link to the measured ring collectives, with equal weights.

    Source: nonnegative linear least squares of (start + steps latency + sent / rate) / measured - 1.
    """
    rings = [point for point in points if point.kind in RINGS]
    times = np.array([point.seconds for point in rings])
    steps = np.array([RINGS[point.kind] * (point.size - 1) for point in rings], float)
    sent = steps * [point.num_bytes / point.size for point in rings]
    columns = np.stack([np.ones_like(times), steps, sent], axis=1) / times[:, None]
    used = [0, 1, 2] if len(set(steps)) > 1 else [0, 2]
    while True:
        solution, *_ = np.linalg.lstsq(columns[:, used], np.ones_like(times), rcond=None)
        if (solution >= 0).all() or len(used) == 1:
            break
        used = [column for column, value in zip(used, solution, strict=True) if value >= 0] or [2]
    value = dict.fromkeys((0, 1, 2), 0.0) | dict(zip(used, solution.tolist(), strict=True))
    error = float(np.abs(columns @ [value[0], value[1], value[2]] - 1).mean())
    return Fit(1 / max(value[2], 1e-15), value[1], value[0], error)


def _head(here: Cluster, known: bool) -> list[str]:
    lines = [f'like = "{here.chip.name}"'] if known else [f'name = "{here.chip.name}"']
    lines.append(f'shape = "{here.size}"')
    if not here.chip.shared and here.memory_bytes is not None:
        text = quantity_text(here.memory_bytes, "bytes", 6)
        lines += [f'usable_memory = "{text}"'] if known else [f'memory = "{text}"']
    return lines


def _compute(devices: Sequence[Any], chip: Chip, node: int, seconds: float) -> Iterator[str]:
    """Yields the best rate of each dtype: as a share of the chip's peak, or as a peak where no data sheet has one."""
    dtypes = [dtype for dtype in JAX_DTYPES if dtype in chip.peak_flops or not chip.peak_flops]
    best = {}
    for dtype in dtypes:
        rates = matmul_rates(devices, dtype, seconds / len(dtypes))
        best[dtype] = max(rates.values())
        by_size = ", ".join(f"{size}: {_rate(rate)}" for size, rate in rates.items())
        yield f"# matmul {dtype}, one device, by size: {by_size}"
    peaks = {dtype: rate for dtype, rate in best.items() if _is_absolute(chip, rate, chip.peak_flops.get(dtype))}
    times = node if chip.shared else 1
    if peaks:
        yield _dtypes("peak", {dtype: _rate(rate * times) for dtype, rate in peaks.items()})
    shares = {dtype: 1.0 if dtype in peaks else rate / chip.peak_flops[dtype] for dtype, rate in best.items()}
    yield _dtypes("matmul_share", {dtype: quantity_text(share, "share") for dtype, share in shares.items()})


def _memory(devices: Sequence[Any], here: Cluster, node: int, seconds: float) -> Iterator[str]:
    rate = memory_rate(devices, min(PROBED_BYTES, _limit(here)) // 4 * 4, seconds)
    sheet = here.chip.memory_bytes_per_second
    if _is_absolute(here.chip, rate, sheet):
        yield f'memory_rate = "{quantity_text(rate * (node if here.chip.shared else 1), "bytes per second")}"'
        rate = sheet = 1.0
    yield f'memory_share = "{quantity_text(rate / (sheet or 1.0), "share")}"'


def _link(here: Cluster, name: str, points: Sequence[Collected], node: int, start_after_matmul: float) -> Iterator[str]:
    for kind in dict.fromkeys(point.kind for point in points):
        for size in dict.fromkeys(point.size for point in points):
            matching = [point for point in points if (point.kind, point.size) == (kind, size)]
            texts = (f"{bytes_text(point.num_bytes)}: {quantity_text(point.seconds, 'seconds')}" for point in matching)
            yield f"# {kind} over {size}: {', '.join(texts)}"
    known = here.chip.inside if name == "inside" else here.chip.between
    fit = fitted([point for point in points if point.kind != "all_reduce" or not (known and known.in_switch_share)])
    yield f"# fitted with a mean error of {100 * fit.error:.0f} %"
    if known is not None and known.kind != "switch" and name == "inside":
        plain = replace(here, chip=replace(here.chip, inside=replace(known, share=1.0)))
        link_rate = axis_link(plain, MeshShape.of({"x": here.devices_per_node}), "x").bytes_per_second
        yield f'share = "{quantity_text(min(fit.bytes_per_second / link_rate, 1.99), "share")}"'
    else:
        times = node if here.chip.shared else 1
        yield f'name = "{known.name if known else name}"'
        yield f'rate = "{quantity_text(min(max(fit.bytes_per_second * times, 1e6), 1e15), "bytes per second")}"'
        yield 'share = "100 %"'
    if known is not None and known.in_switch_share:
        reduction_rate = _largest_rate(points, fit, known.in_switch_devices or 2)
        yield f'in_switch_share = "{quantity_text(min(reduction_rate / fit.bytes_per_second, 1.99), "share")}"'
    if start_after_matmul:
        yield f"# start alone: {quantity_text(max(fit.start_seconds, 1e-9), 'seconds')}; after a matmul:"
    for key, value in {"latency": fit.latency_seconds, "start": max(fit.start_seconds, start_after_matmul)}.items():
        yield f'{key} = "{quantity_text(min(max(value, 1e-9), 1.0), "seconds")}"'


def _largest_rate(points: Sequence[Collected], fit: Fit, from_devices: int) -> float:
    """Returns the bandwidth of the largest all_reduce over `from_devices` or more, without start and latency."""
    reductions = [point for point in points if point.kind == "all_reduce" and point.size >= from_devices]
    if not reductions:
        return fit.bytes_per_second
    largest = max(reductions, key=lambda point: point.num_bytes)
    steps = 2 * (largest.size - 1)
    send_seconds = max(largest.seconds - fit.start_seconds - steps * fit.latency_seconds, largest.seconds / 2)
    return steps * largest.num_bytes / largest.size / send_seconds


def _groups(devices: Sequence[Any], here: Cluster) -> dict[str, list[list[list[Any]]]]:
    """Returns the device groups to measure by link: nodes, and pairs, which separate latency from start."""
    node = here.devices_per_node
    nodes = [list(devices[first : first + node]) for first in range(0, len(devices), node)]
    groups: dict[str, list[list[list[Any]]]] = {}
    if node > 1:
        groups["inside"] = [nodes]
        if node > 2 and node % 2 == 0 and (here.chip.inside is None or here.chip.inside.kind == "switch"):
            groups["inside"].append([node_devices[i : i + 2] for node_devices in nodes for i in range(0, node, 2)])
    if len(nodes) > 1:
        groups["between"] = [[list(across) for across in zip(*nodes, strict=True)]]
    return groups


def _limit(here: Cluster) -> int:
    return (here.memory_bytes or 16 * PROBED_BYTES) // 16


def _is_absolute(chip: Chip, rate: float, sheet: float | None) -> bool:
    """Whether to write a rate instead of a share: that of a host, above the data sheet, or without one."""
    return chip.shared or sheet is None or rate > sheet


def _rate(rate: float) -> str:
    return quantity_text(max(rate, 1e6), "operations per second")


def _dtypes(key: str, texts: Mapping[str, str]) -> str:
    inner = ", ".join(f'{dtype} = "{text}"' for dtype, text in texts.items())
    return f"{key} = {{ {inner} }}"


def _sources(lines: Sequence[str], source: str) -> Iterator[str]:
    """Yields the source of each number in the lines."""
    group = ""
    for line in lines:
        key, equals, _ = line.partition(" = ")
        if line.startswith("["):
            group = line.strip("[]") + "."
        elif equals and not line.startswith("#") and key not in ("like", "name", "shape"):
            yield f'"{group}{key}" = "{source}"'
