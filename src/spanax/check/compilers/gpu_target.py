"""GPU descriptions that let XLA's GPU compiler run without a GPU or a driver.

Source: limits of each compute capability, CUDA C++ Programming Guide, "Compute Capabilities"; number of
multiprocessors, L2 size and float32 rate, NVIDIA's architecture white papers, data sheets (A100, H100, H200, DGX B200)
and tuning guides (Ampere, Hopper, Blackwell). Memory size and bandwidth come from `hardware/chips.toml`. The field
names are those of XLA's GpuTargetConfigProto (openxla/xla xla/stream_executor/device_description.proto).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spanax.hardware.chip import Chip

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """The resources of a GPU, per device and per multiprocessor."""

    label: str
    capability: tuple[int, int]
    num_multiprocessors: int
    lanes: int
    peak_fp32_flops: float
    l2_bytes: int
    shared_bytes: int

    @property
    def clock_ghz(self) -> float:
        """The boost clock, derived from the peak: each lane runs one fused multiply-add per cycle."""
        return self.peak_fp32_flops / (self.num_multiprocessors * self.lanes * 2) / 1e9


A100 = Gpu("NVIDIA A100-SXM4", (8, 0), 108, 64, 19.5e12, 40 * MIB, 164 * KIB)
H100 = Gpu("NVIDIA H100", (9, 0), 132, 128, 67e12, 50 * MIB, 228 * KIB)
H200 = Gpu("NVIDIA H200", (9, 0), 132, 128, 67e12, 50 * MIB, 228 * KIB)
B200 = Gpu("NVIDIA B200", (10, 0), 148, 128, 75e12, 126 * MIB, 228 * KIB)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {"a100-80gb": A100, "a100-40gb": A100, "h100": H100, "h200": H200, "b200": B200}
)
"""The chips of the catalog that have a description."""

RESERVED_SHARED_BYTES = 1 * KIB
"""Shared memory per block that is reserved for the system. Source: CUDA C++ Programming Guide."""


def target_text(chip: Chip) -> str:
    """Returns the description of a chip as a GpuTargetConfigProto in text format.

    Example:
      >>> from spanax.hardware.chips import chip_named
      >>> print(target_text(chip_named("h100")).splitlines()[1])
        name: "NVIDIA H100"
    """
    gpu = GPUS[chip.name]
    major, minor = gpu.capability
    fields = {
        "name": f'"{gpu.label}"',
        "device_vendor": '"NVIDIA Corporation"',
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_core": gpu.shared_bytes,
        "shared_memory_per_block_optin": gpu.shared_bytes - RESERVED_SHARED_BYTES,
        "threads_per_core_limit": 2048,
        "core_count": gpu.num_multiprocessors,
        "fpus_per_core": gpu.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "device_address_bits": 64,
        "memory_bandwidth": int(chip.memory_bytes_per_second or 0),
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": round(gpu.clock_ghz, 3),
        "device_memory_size": chip.memory_bytes,
        "registers_per_core_limit": 64 * KIB,
        "registers_per_block_limit": 64 * KIB,
        "cuda_compute_capability": f"{{ major: {major} minor: {minor} }}",
        "runtime_version": '"12.8.0"',
        "driver_version": '"12.8.0"',
        "compile_time_toolkit_version": '"12.8.0"',
        "dnn_version": '"9.8.0"',
    }
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    parts = ["gpu_device_info {", *lines, "}", 'platform_name: "CUDA"']
    parts += ["dnn_version_info { major: 9 minor: 8 patch: 0 }", "runtime_version { major: 12 minor: 8 patch: 0 }"]
    return "\n".join([*parts, f'device_description_str: "{gpu.label}"']) + "\n"
