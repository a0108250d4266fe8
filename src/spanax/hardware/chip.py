"""Chip and Link: what one JAX device can do, and what joins it to others; every number with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from spanax.errors import SpanaxError, nearest

LinkKind = Literal["switch", "direct", "torus"]


@dataclass(frozen=True)
class Link:
    """What joins devices: a `switch`, a `direct` line to every other device, or the lines of a `torus`.

    `bytes_per_second` goes one way: out of one device through a switch, over all of its lines together if they are
    `direct`, over one line in one direction in a torus. `share` of it is reached by large collectives.
    `latency_seconds` passes at every step (hop) of one, `start_seconds` once. A switch or direct link spans
    `max_devices`. One that adds up in the switch itself does so from `in_switch_devices` on, and an all-reduce then
    goes as if at `in_switch_share`. A torus has at most `max_shape` chips; all of its dims wrap around if each is a
    multiple of `wrap_multiple`, or else each dim that has `wrap_size`. `on_chip_bytes_per_second`
    joins the devices of one chip.

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
    max_shape: tuple[int, ...] = ()
    wrap_multiple: int | None = None
    wrap_size: int | None = None
    on_chip_bytes_per_second: float | None = None

    @property
    def effective_bytes_per_second(self) -> float:
        """What large messages reach of `bytes_per_second`."""
        return self.bytes_per_second * self.share

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which dims of a torus slice are closed to rings."""
        if self.wrap_multiple:
            return (all(size % self.wrap_multiple == 0 for size in shape),) * len(shape)
        return tuple(size == self.wrap_size for size in shape)


@dataclass(frozen=True)
class Chip:
    """One JAX device: its compute, memory and links. None: not known.

    `peak_flops` is per second, by dtype: `bf16`, `fp16`, `fp8`, `int8`, and `fp32` for what a float32 matmul gets by
    default (TF32 from Ampere on, bf16 passes on TPU). `matmul_shares` of it are reached by the best matmul measured;
    under a long load `sustained_share` of that is left. A matmul is divided into tiles over `num_cores`; None: one
    core does all of it. `usable_bytes` of `memory_bytes` are left to a program; JAX takes only `preallocated_share` of
    a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. `memory_share` of `memory_bytes_per_second` is reached.
    `host_bytes_per_second` goes one way. What a host `shared` among its devices has, they divide. `inside` joins the
    devices of a node or slice, `between` the nodes or slices. `sources` says of every number where it is from.

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
    preallocated_share: float | None = None
    memory_bytes_per_second: float | None = None
    memory_share: float = 1.0
    kernel_start_seconds: float = 0.0
    num_cores: int | None = None
    sustained_share: float = 1.0
    host_bytes_per_second: float | None = None
    devices_per_chip: int = 1
    devices_per_host: int | None = None
    shared: bool = False
    inside: Link | None = None
    between: Link | None = None
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def flops_per_second(self, dtype: str) -> float:
        """What the best matmul of a dtype reaches, in operations a second; the peak where no share is known.

        Raises:
          SpanaxError: the chip does not compute in that dtype, or nothing is known of its compute.

        Example:
          >>> from spanax.hardware.chips import chip_named
          >>> round(chip_named("h100").flops_per_second("bf16") / 1e12)
          794
        """
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops) or "no dtype, for its rates are not known"
            raise SpanaxError(
                f"'{self.name}' does not compute in {dtype}.",
                where=f"it computes in {known}",
                fix=nearest(dtype, self.peak_flops) if self.peak_flops else "a cluster file with its rates",
            )
        return self.peak_flops[dtype] * self.matmul_shares.get(dtype, self.matmul_shares.get("bf16", 1.0))

    def divided(self, devices: int) -> "Chip":
        """What each of a host's devices has if they share it; otherwise the chip as it is."""
        if not self.shared or devices == 1:
            return self
        return replace(
            self,
            peak_flops={dtype: peak / devices for dtype, peak in self.peak_flops.items()},
            memory_bytes=self.memory_bytes and self.memory_bytes // devices,
            usable_bytes=self.usable_bytes and self.usable_bytes // devices,
            memory_bytes_per_second=self.memory_bytes_per_second and self.memory_bytes_per_second / devices,
            inside=self.inside and replace(self.inside, bytes_per_second=self.inside.bytes_per_second / devices),
        )
