"""Specifications of devices (`Chip`) and of their interconnect (`Link`), each number with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from spanax.errors import HardwareError, nearest

LinkKind = Literal["switch", "direct", "torus"]


@dataclass(frozen=True)
class Link:
    """An interconnect between devices: a `switch`, `direct` links between all pairs of devices, or a `torus`.

    `bytes_per_second` is unidirectional: per device for a switch, summed over the links of a device for `direct`, and
    per link for a torus. Large collectives achieve the fraction `share` of it. A collective takes `start_seconds` once
    and `latency_seconds` per step (hop). A switch or direct link connects up to `max_devices`. A switch that reduces
    in the network does so for groups of at least `in_switch_devices`, and an all-reduce then runs at the fraction
    `in_switch_share` of the bandwidth. Collectives that run during computation slow it by the share `contention` of
    their time. A torus has at most `max_shape` chips; all dims wrap around if every size is a
    multiple of `wrap_multiple`, otherwise each dim of size `wrap_size` does. `on_chip_bytes_per_second` is the
    bandwidth between the devices of one chip.

    Example:
      >>> link = Link("nvlink", "switch", 300e9, share=0.76, latency_seconds=3.4e-6, max_devices=8)
      >>> round(link.effective_bytes_per_second / 1e9)
      228
      >>> Link("ici", "torus", 50e9, max_shape=(16, 16), wrap_size=16).wraps((8, 16))
      (False, True)
    """

    name: str
    kind: LinkKind
    bytes_per_second: float
    share: float = 1.0
    latency_seconds: float = 0.0
    start_seconds: float = 0.0
    max_devices: int | None = None
    in_switch_share: float | None = None
    in_switch_devices: int | None = None
    contention: float = 0.0
    max_shape: tuple[int, ...] = ()
    wrap_multiple: int | None = None
    wrap_size: int | None = None
    on_chip_bytes_per_second: float | None = None

    @property
    def effective_bytes_per_second(self) -> float:
        """The bandwidth that large messages achieve: `bytes_per_second` times `share`."""
        return self.bytes_per_second * self.share

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns, for each dim of a torus slice, whether it wraps around."""
        if self.wrap_multiple:
            return (all(size % self.wrap_multiple == 0 for size in shape),) * len(shape)
        return tuple(size == self.wrap_size for size in shape)


@dataclass(frozen=True)
class Chip:
    """The compute, memory and links of one JAX device. None means unknown.

    `peak_flops` is in FLOP/s by dtype: `bf16`, `fp16`, `fp8`, `fp4`, `int8`, and `fp32` for a float32 matmul at JAX's
    default precision (TF32 on GPUs since Ampere, bf16 passes on TPUs). `matmul_shares` is the fraction of it that the
    fastest measured matmul achieves, and `sustained_share` the fraction of that under sustained load. The tiles of a
    matmul are distributed over `num_cores`; None means a single core, whose tiles have `tile` rows and columns.
    `vector_flops_per_second` is the peak of the units that multiply no matrices, in float32. `usable_bytes` of
    `memory_bytes` are available to a program, which achieves the fraction `memory_share` of `memory_bytes_per_second`;
    `on_chip_bytes` are on the chip and allocated by the compiler (None: by no compiler). If `shared`, all devices are
    simulated on one host and divide its resources. `inside` is the link between the devices of a node or slice,
    `between` the link between nodes or slices. `host_bytes_per_second` is the unidirectional bandwidth of the link to
    host memory, which `devices_per_host_link` devices share. `dollars_per_hour` is the price of a device, of a cluster
    file only. `sources` has the origin of each number.

    Example:
      >>> from spanax.hardware.chips import chip_named
      >>> chip = chip_named("a100")
      >>> chip.name, chip.peak_flops["bf16"], chip.sources["peak_flops.bf16"].split(":")[0]
      ('a100-80gb', 312000000000000.0, 'stas00/ml-engineering @744d01e')
    """

    name: str
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    matmul_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    on_chip_bytes: int | None = None
    memory_bytes_per_second: float | None = None
    memory_share: float = 1.0
    kernel_start_seconds: float = 0.0
    num_cores: int | None = None
    tile: int = 128
    vector_flops_per_second: float | None = None
    sustained_share: float = 1.0
    devices_per_chip: int = 1
    devices_per_host: int | None = None
    shared: bool = False
    inside: Link | None = None
    between: Link | None = None
    host_bytes_per_second: float | None = None
    devices_per_host_link: int = 1
    dollars_per_hour: float | None = None
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def flops_per_second(self, dtype: str) -> float:
        """Returns the FLOP/s of the fastest measured matmul in a dtype, or the peak if none was measured.

        Raises:
          SpanaxError: the chip does not support the dtype, or its compute is unknown.

        Example:
          >>> from spanax.hardware.chips import chip_named
          >>> round(chip_named("h100").flops_per_second("bf16") / 1e12)
          794
        """
        if (dtype == "fp16" or self.shared) and dtype not in self.peak_flops and "fp32" in self.peak_flops:
            dtype = "fp32"  # XLA converts the operands
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops) or "no dtype, for its rates are not known"
            raise HardwareError(
                f"'{self.name}' does not compute in {dtype}.",
                where=f"it computes in {known}",
                fix=nearest(dtype, self.peak_flops) if self.peak_flops else "a cluster file with its rates",
            )
        return self.peak_flops[dtype] * self.matmul_shares.get(dtype, self.matmul_shares.get("bf16", 1.0))

    def host_seconds(self, num_bytes: Any) -> Any:
        """Returns the time in which every device transfers `num_bytes` to or from host memory, a number or an array.

        Raises:
          SpanaxError: the bandwidth is unknown.

        Example:
          >>> from spanax.hardware.chips import chip_named
          >>> chip_named("h100").host_seconds(128e9)
          2.0
        """
        if self.host_bytes_per_second is None:
            raise HardwareError(
                f"the bandwidth between '{self.name}' and host memory is unknown.",
                where="state or activations in host memory",
                fix='a cluster file with host_rate = "64 GB/s"',
            )
        return num_bytes * self.devices_per_host_link / self.host_bytes_per_second

    def divided(self, devices: float) -> "Chip":
        """Returns the chip with the resources of a shared host divided by `devices`; other chips are unchanged.

        The inverse divides by `1 / devices`.
        """
        if not self.shared or devices == 1:
            return self
        return replace(
            self,
            peak_flops={dtype: peak / devices for dtype, peak in self.peak_flops.items()},
            memory_bytes=self.memory_bytes and int(self.memory_bytes // devices),
            usable_bytes=self.usable_bytes and int(self.usable_bytes // devices),
            memory_bytes_per_second=self.memory_bytes_per_second and self.memory_bytes_per_second / devices,
            inside=self.inside and replace(self.inside, bytes_per_second=self.inside.bytes_per_second / devices),
        )
