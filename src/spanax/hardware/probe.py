"""Measurement of the local devices, as a cluster file that overrides the numbers of the catalog."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanax.errors import HardwareError, RangeError
from spanax.hardware.chip import Chip, Link
from spanax.hardware.cluster import Cluster, cluster_text, local
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

CHIP_NUMBERS = (
    "memory_bytes", "usable_bytes", "memory_bytes_per_second", "memory_share", "kernel_start_seconds",
)  # fmt: skip
LINK_NUMBERS = ("bytes_per_second", "share", "latency_seconds", "start_seconds", "in_switch_share")
"""The numbers of a chip and of a link that are measured, by field."""

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
    chip = here.chip
    if not chip.peak_flops and here.memory_bytes is None:
        raise HardwareError(
            f"'{chip.name}' is not in the catalog, and its memory is unknown.",
            fix="write a cluster file by hand: docs/hardware.md",
        )
    source = f"probe of {len(devices)} x {chip.name}, jax {jax.__version__}, {datetime.date.today()}"
    notes = [source]
    measured = _with_matmuls(chip, devices, seconds * 0.3, notes)
    rate = memory_rate(devices, min(PROBED_BYTES, _limit(here)) // 4 * 4, seconds * 0.1)
    sheet = chip.memory_bytes_per_second
    full_rate = rate if sheet is None or _is_absolute(chip, rate, sheet) else sheet
    measured = replace(
        measured,
        memory_bytes=chip.memory_bytes or here.memory_bytes,
        usable_bytes=here.memory_bytes or chip.usable_bytes,
        memory_bytes_per_second=full_rate,
        memory_share=rate / full_rate,
        kernel_start_seconds=max(kernel_start_seconds(devices, seconds * 0.05), 1e-9),
    )
    groups = _groups(devices, here)
    for name, grouped in groups.items():
        points = [
            point
            for part in grouped
            for point in collected(part, _limit(here), seconds * 0.45 / len(groups) / len(grouped))
        ]
        start_after_matmul = start_after_matmul_seconds(devices, seconds * 0.1) if chip.shared else 0.0
        link: dict[str, Any] = {name: _link(here, name, points, start_after_matmul, notes)}
        measured = replace(measured, **link)
    numbers = [
        *CHIP_NUMBERS,
        *(f"{kind}.{dtype}" for kind in ("peak_flops", "matmul_shares") for dtype in JAX_DTYPES),
        *(f"{name}.{number}" for name in groups for number in LINK_NUMBERS),
    ]
    measured = replace(measured, sources={**chip.sources, **dict.fromkeys(numbers, source)})
    return "".join(f"# {note}\n" for note in notes) + cluster_text(replace(here, chip=measured))


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


def _with_matmuls(chip: Chip, devices: Sequence[Any], seconds: float, notes: list[str]) -> Chip:
    """Returns a chip with the best rate of each dtype: a share of its peak, or a peak where no data sheet has one."""
    dtypes = [dtype for dtype in JAX_DTYPES if dtype in chip.peak_flops or not chip.peak_flops]
    peaks = dict(chip.peak_flops)
    shares = dict(chip.matmul_shares)
    for dtype in dtypes:
        rates = matmul_rates(devices, dtype, seconds / len(dtypes))
        by_size = ", ".join(f"{size}: {quantity_text(rate, 'operations per second')}" for size, rate in rates.items())
        notes.append(f"matmul {dtype}, one device, by size: {by_size}")
        best = max(1e6, *rates.values())
        if _is_absolute(chip, best, chip.peak_flops.get(dtype)):
            peaks[dtype] = best
        shares[dtype] = best / peaks[dtype]
    return replace(chip, peak_flops=peaks, matmul_shares=shares)


def _link(here: Cluster, name: str, points: Sequence[Collected], start_after_matmul: float, notes: list[str]) -> Link:
    for kind in dict.fromkeys(point.kind for point in points):
        for size in dict.fromkeys(point.size for point in points):
            matching = [point for point in points if (point.kind, point.size) == (kind, size)]
            texts = (f"{bytes_text(point.num_bytes)}: {quantity_text(point.seconds, 'seconds')}" for point in matching)
            notes.append(f"{kind} over {size}{' nodes' if name == 'between' else ''}: {', '.join(texts)}")
    known = here.chip.inside if name == "inside" else here.chip.between
    fit = fitted([point for point in points if point.kind != "all_reduce" or not (known and known.in_switch_share)])
    notes.append(f"fitted with a mean error of {100 * fit.error:.0f} %")
    if start_after_matmul:
        alone = quantity_text(max(fit.start_seconds, 1e-9), "seconds")
        notes.append(f"start alone: {alone}; after a matmul: {quantity_text(max(start_after_matmul, 1e-9), 'seconds')}")
    link = replace(
        known or Link(name, "switch", 0.0),
        latency_seconds=min(max(fit.latency_seconds, 1e-9), 1.0),
        start_seconds=min(max(fit.start_seconds, start_after_matmul, 1e-9), 1.0),
    )
    if link.kind != "switch" and name == "inside":
        plain = replace(here, chip=replace(here.chip, inside=replace(link, share=1.0)))
        link_rate = axis_link(plain, MeshShape.of({"x": here.devices_per_node}), "x").bytes_per_second
        link = replace(link, share=min(fit.bytes_per_second / link_rate, 1.99))
    else:
        link = replace(link, bytes_per_second=min(max(fit.bytes_per_second, 1e6), 1e13), share=1.0)
    if link.in_switch_share:
        reduction_rate = _largest_rate(points, fit, link.in_switch_devices or 2)
        link = replace(link, in_switch_share=min(reduction_rate / fit.bytes_per_second, 1.99))
    return link


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
