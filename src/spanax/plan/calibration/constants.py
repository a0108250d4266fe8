"""The constants of a chip that measured steps can move, and the cluster with other values of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from spanax.hardware.chip import Chip, Link
from spanax.hardware.cluster import Cluster

LinkName = Literal["inside", "between"]

Change = Callable[[Chip, float], tuple[Chip, tuple[str, ...]]]
"""Returns a chip on which a part of the step takes `factor` times as long, and the names of the changed fields."""


@dataclass(frozen=True)
class Constant:
    """One constant that calibration may change.

    Attributes:
      name: its name in answers.
      unit: `FLOP/s`, `B/s` or `s`.
      value: returns the value on a chip, for matmuls in a dtype; None where the chip has none.
      slowed: returns the chip on which what the constant determines takes `factor` times as long.
    """

    name: str
    unit: str
    value: Callable[[Chip, str], float | None]
    slowed: Change


def slowed(cluster: Cluster, factors: Mapping[str, float], source: str = "") -> Cluster:
    """Returns the cluster on which the work of each constant takes `factors[name]` times as long.

    Args:
      cluster: the devices.
      factors: by name of the constant; 1 for constants that are not in it.
      source: the new source of the changed numbers.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> chip = slowed(cluster("h100:8"), {"matmul rate": 1.25, "kernel start": 2.0}, "runs/a").chip
      >>> round(chip.sustained_share / cluster("h100:8").chip.sustained_share, 3), chip.sources["sustained_share"]
      (0.8, 'runs/a')
    """
    chip = cluster.chip
    changed = list[str]()
    for constant in CONSTANTS:
        factor = factors.get(constant.name, 1.0)
        if factor != 1.0 and constant.value(chip, "fp32") is not None:
            chip, fields = constant.slowed(chip, factor)
            changed += fields
    sources = {**chip.sources, **dict.fromkeys(changed, source)} if source else chip.sources
    return replace(cluster, chip=replace(chip, sources=sources))


def _matmul_rate(chip: Chip, dtype: str) -> float | None:
    if not chip.peak_flops:
        return None
    return chip.flops_per_second(dtype if dtype in chip.peak_flops else next(iter(chip.peak_flops))) * (
        chip.sustained_share
    )


def _slower_matmuls(chip: Chip, factor: float) -> tuple[Chip, tuple[str, ...]]:
    # The rates of a host come from a probe, not from a data sheet: a share above 1 would mean nothing.
    if chip.shared:
        peaks = {dtype: peak / factor for dtype, peak in chip.peak_flops.items()}
        return replace(chip, peak_flops=peaks), tuple(f"peak_flops.{dtype}" for dtype in peaks)
    return replace(chip, sustained_share=chip.sustained_share / factor), ("sustained_share",)


def _memory_rate(chip: Chip, dtype: str) -> float | None:
    return chip.memory_bytes_per_second and chip.memory_bytes_per_second * chip.memory_share


def _slower_memory(chip: Chip, factor: float) -> tuple[Chip, tuple[str, ...]]:
    if chip.shared and chip.memory_bytes_per_second:
        return replace(chip, memory_bytes_per_second=chip.memory_bytes_per_second / factor), (
            "memory_bytes_per_second",
        )
    return replace(chip, memory_share=chip.memory_share / factor), ("memory_share",)


def _kernel_start(chip: Chip, dtype: str) -> float | None:
    return chip.kernel_start_seconds or None


def _slower_starts(chip: Chip, factor: float) -> tuple[Chip, tuple[str, ...]]:
    return replace(chip, kernel_start_seconds=chip.kernel_start_seconds * factor), ("kernel_start_seconds",)


def _link(chip: Chip, name: LinkName) -> Link | None:
    return chip.inside if name == "inside" else chip.between


def _with_link(chip: Chip, name: LinkName, fields: Mapping[str, float]) -> tuple[Chip, tuple[str, ...]]:
    link = _link(chip, name)
    assert link is not None
    changed: dict[str, Any] = {name: replace(link, **fields)}  # type: ignore[arg-type]
    return replace(chip, **changed), tuple(f"{name}.{field}" for field in fields)


def _link_rate(name: LinkName) -> Constant:
    def value(chip: Chip, dtype: str) -> float | None:
        link = _link(chip, name)
        return None if link is None else link.effective_bytes_per_second

    def slower(chip: Chip, factor: float) -> tuple[Chip, tuple[str, ...]]:
        link = _link(chip, name)
        assert link is not None
        if chip.shared:
            return _with_link(chip, name, {"bytes_per_second": link.bytes_per_second / factor})
        shares = {"share": link.share, "in_switch_share": link.in_switch_share}
        return _with_link(chip, name, {field: share / factor for field, share in shares.items() if share})

    return Constant(f"link {name}, rate", "B/s", value, slower)


def _link_start(name: LinkName) -> Constant:
    def value(chip: Chip, dtype: str) -> float | None:
        link = _link(chip, name)
        return None if link is None else link.start_seconds or link.latency_seconds or None

    def slower(chip: Chip, factor: float) -> tuple[Chip, tuple[str, ...]]:
        link = _link(chip, name)
        assert link is not None
        seconds = {"start_seconds": link.start_seconds * factor, "latency_seconds": link.latency_seconds * factor}
        return _with_link(chip, name, {field: value for field, value in seconds.items() if value})

    return Constant(f"link {name}, start", "s", value, slower)


CONSTANTS = (
    Constant("matmul rate", "FLOP/s", _matmul_rate, _slower_matmuls),
    Constant("memory rate", "B/s", _memory_rate, _slower_memory),
    Constant("kernel start", "s", _kernel_start, _slower_starts),
    _link_rate("inside"),
    _link_start("inside"),
    _link_rate("between"),
    _link_start("between"),
)
"""All constants that calibration may change, at most seven."""
