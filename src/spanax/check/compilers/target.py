"""Compiler targets for clusters: platform, topology and compiler options, without the hardware."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import Any

from spanax.errors import UnsupportedError
from spanax.hardware.chip import Chip
from spanax.hardware.cluster import Cluster
from spanax.hardware.slices import shape_text

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


A100 = Gpu("NVIDIA A100-SXM4", (8, 0), 108, 64, 19.5e12, 40 * MIB, 164 * KIB)
H100 = Gpu("NVIDIA H100", (9, 0), 132, 128, 67e12, 50 * MIB, 228 * KIB)
H200 = Gpu("NVIDIA H200", (9, 0), 132, 128, 67e12, 50 * MIB, 228 * KIB)
B200 = Gpu("NVIDIA B200", (10, 0), 148, 128, 75e12, 126 * MIB, 228 * KIB)
L4 = Gpu("NVIDIA L4", (8, 9), 58, 128, 30.3e12, 48 * MIB, 100 * KIB)
RTX4090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 82.6e12, 72 * MIB, 100 * KIB)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "a100-80gb": A100,
        "a100-40gb": A100,
        "h100": H100,
        "h200": H200,
        "b200": B200,
        "l4": L4,
        "rtx4090": RTX4090,
    }
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
    clock_hz = gpu.peak_fp32_flops / (gpu.num_multiprocessors * gpu.lanes * 2)  # of a lane's fused multiply-adds
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
        "clock_rate_ghz": round(clock_hz / 1e9, 3),
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


TPUS = {"v3": "v3", "v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "v7": "tpu7x"}
"""Chips of the catalog -> their names in libtpu."""

INSTALL = {"tpu": "pip install 'spanax[tpu]'", "cuda": "pip install 'spanax[cuda12]'"}


@dataclass(frozen=True)
class Target:
    """The target of a compilation; `platform` is JAX's name: `tpu`, `cuda`, `cpu`."""

    platform: str
    topology: str
    num_devices: int
    options: dict[str, Any] = field(default_factory=dict)
    num_slices: int = 1


def target_of(cluster: Cluster) -> Target:
    """Returns the target of a cluster, for the compiler of its chips.

    Raises:
      SpanaxError: no known compiler targets this chip without the hardware.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> target_of(cluster("v5p:4x4x4")).options["wrap"], target_of(cluster("v5e:8x16")).options["wrap"]
      ((True, True, True), (False, True, False))
      >>> target_of(cluster("h100:2x8")).topology
      '1x2x8'
    """
    chip = cluster.chip
    shape = cluster.shape
    if chip.name in TPUS:
        wraps = chip.inside.wraps(shape) if chip.inside else ()
        options: dict[str, Any] = {"wrap": (*wraps, False, False, False)[:3]}
        host_bounds = _host_bounds(shape, cluster.num_devices // chip.devices_per_chip // cluster.num_slices)
        if host_bounds is not None:
            options["chips_per_host_bounds"] = host_bounds
        if chip.name == "v4":
            options["chip_config_name"] = (
                "megacore"  # without megacore, a chip is two devices with half the memory each
            )
        if cluster.num_slices > 1:
            options["num_slices"] = cluster.num_slices
        return Target("tpu", f"{TPUS[chip.name]}:{shape_text(shape)}", cluster.num_devices, options, cluster.num_slices)
    if chip.name in GPUS:
        nodes, per_node = shape if len(shape) == 2 else (1, cluster.num_devices)
        return Target("cuda", f"1x{nodes}x{per_node}", cluster.num_devices, {"target_config": target_text(chip)})
    raise UnsupportedError(
        f"no known compiler targets {chip.name} without the hardware.",
        where=f"level 3 on {cluster}",
        fix=f"level 2, or one of {', '.join([*TPUS, *GPUS])}",
    )


def platform_of(cluster: Cluster) -> str:
    """Returns JAX's platform of a cluster's chips: `tpu` or `cuda`, or `cpu` if their compiler is not supported."""
    if cluster.chip.name in TPUS:
        return "tpu"
    return "cuda" if cluster.chip.name in GPUS else "cpu"


def simulated_target(num_devices: int) -> Target:
    """Returns the target of a number of simulated CPU devices."""
    return Target("cpu", f"cpu:{num_devices}", num_devices)


def install_command(platform: str) -> str:
    """Returns the command that installs a platform's compiler; empty if it is installed.

    A CUDA plugin without ptxas and libdevice crashes when it compiles, so they are required as well. JAX does not load
    a plugin of another version.
    """
    if platform == "tpu":
        return "" if importlib.util.find_spec("libtpu") is not None else INSTALL["tpu"]
    if platform != "cuda":
        return ""
    if importlib.util.find_spec("jax_cuda12_plugin") is None or cuda_folder() is None:
        return INSTALL["cuda"]
    required = metadata.version("jaxlib")
    installed = metadata.version("jax-cuda12-plugin")
    return "" if required == installed else f"pip install jax-cuda12-plugin=={required} jax-cuda12-pjrt=={required}"


MEASURED_WITH = MappingProxyType({"tpu": ("libtpu", "0.0.52"), "cuda": ("jax-cuda12-plugin", "0.10.2")})
"""By platform, the package of the compiler with which estimates of memory were measured, and its version."""


def other_compiler(cluster: Cluster) -> str:
    """Returns a note if the installed compiler of a cluster's chips is not the one that estimates were made for."""
    package, measured = MEASURED_WITH[platform_of(cluster)]
    installed = metadata.version(package)
    return "" if installed == measured else f"note: {package} is {installed}; estimates were measured with {measured}"


def cuda_folder() -> str | None:
    """Returns the folder of the installed wheel with ptxas and libdevice, or None."""
    spec = importlib.util.find_spec("nvidia.cuda_nvcc") if importlib.util.find_spec("nvidia") else None
    return next(iter(spec.submodule_search_locations), None) if spec and spec.submodule_search_locations else None


def _host_bounds(shape: tuple[int, ...], num_chips: int) -> tuple[int, int, int] | None:
    """Returns the shape of one host's chips; None for the default of 2x2."""
    x, y, z = (*shape, 1, 1, 1)[:3]
    if x % 2 == 0 and y % 2 == 0:
        return None
    return (x, y, z) if num_chips < 4 else (1, 1, 1)
