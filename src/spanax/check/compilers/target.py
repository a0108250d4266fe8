"""Target: what a compiler is told of a cluster that is not here: topology, wraparound, cores, the order of devices."""

import importlib.util
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from spanax.check.compilers.gpu_target import GPUS, target_text
from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.hardware.slices import shape_text

TPUS = {"v3": "v3", "v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "v7": "tpu7x"}
"""Chips of the catalogue -> what libtpu calls them."""

INSTALL = {"tpu": "pip install 'spanax[tpu]'", "cuda": "pip install 'spanax[cuda12]'"}


@dataclass(frozen=True)
class Target:
    """Devices as a compiler wants them named; `platform` is JAX's: `tpu`, `cuda`, `cpu`."""

    platform: str
    topology: str
    num_devices: int
    options: dict[str, Any] = field(default_factory=dict)
    num_slices: int = 1


def target_of(cluster: Cluster) -> Target:
    """The real compiler's target for a cluster.

    Raises:
      SpanaxError: no compiler is known that works without this chip.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> target_of(cluster("v5p:4x4x4")).options["wrap"], target_of(cluster("v5e:8x16")).options["wrap"]
      ((True, True, True), (False, True, False))
      >>> target_of(cluster("h100:2x8")).topology
      '1x2x8'
    """
    chip, shape = cluster.chip, cluster.shape
    if chip.name in TPUS:
        wraps = chip.inside.wraps(shape) if chip.inside else ()
        options: dict[str, Any] = {"wrap": (*wraps, False, False, False)[:3]}
        on_host = _on_host(shape, cluster.num_devices // chip.devices_per_chip // cluster.num_slices)
        if on_host is not None:
            options["chips_per_host_bounds"] = on_host
        if chip.name == "v4":
            options["chip_config_name"] = "megacore"  # without it a chip is two devices of half the memory
        if cluster.num_slices > 1:
            options["num_slices"] = cluster.num_slices
        return Target("tpu", f"{TPUS[chip.name]}:{shape_text(shape)}", cluster.num_devices, options, cluster.num_slices)
    if chip.name in GPUS:
        nodes, per_node = shape if len(shape) == 2 else (1, cluster.num_devices)
        return Target("cuda", f"1x{nodes}x{per_node}", cluster.num_devices, {"target_config": target_text(chip)})
    raise SpanaxError(
        f"no compiler is known that works for {chip.name} without one.",
        where=f"level 3 on {cluster}",
        fix=f"level 2, or one of {', '.join([*TPUS, *GPUS])}",
    )


def platform_of(cluster: Cluster) -> str:
    """JAX's platform of a cluster's chips, as far as their compiler is known: `tpu`, `cuda`, or else `cpu`."""
    return "tpu" if cluster.chip.name in TPUS else "cuda" if cluster.chip.name in GPUS else "cpu"


def simulated(num_devices: int) -> Target:
    """So many devices on the CPU."""
    return Target("cpu", f"cpu:{num_devices}", num_devices)


def missing(platform: str) -> str:
    """What must be installed before a platform's compiler can be asked, as one line; empty where all is there.

    A CUDA plugin without ptxas and libdevice dies while it compiles, so they are looked for too; and one of another
    version than JAX's own is not loaded.
    """
    if platform == "tpu":
        return "" if importlib.util.find_spec("libtpu") is not None else INSTALL["tpu"]
    if platform != "cuda":
        return ""
    if importlib.util.find_spec("jax_cuda12_plugin") is None or cuda_folder() is None:
        return INSTALL["cuda"]
    wanted, have = metadata.version("jaxlib"), metadata.version("jax-cuda12-plugin")
    return "" if wanted == have else f"pip install jax-cuda12-plugin=={wanted} jax-cuda12-pjrt=={wanted}"


def cuda_folder() -> str | None:
    """The folder of the installed wheel that has ptxas and libdevice."""
    found = importlib.util.find_spec("nvidia.cuda_nvcc") if importlib.util.find_spec("nvidia") else None
    return next(iter(found.submodule_search_locations), None) if found and found.submodule_search_locations else None


def _on_host(shape: tuple[int, ...], num_chips: int) -> tuple[int, int, int] | None:
    """Chips of one host where they are not the usual 2x2."""
    x, y, z = (*shape, 1, 1, 1)[:3]
    if x % 2 == 0 and y % 2 == 0:
        return None
    return (x, y, z) if num_chips < 4 else (1, 1, 1)
