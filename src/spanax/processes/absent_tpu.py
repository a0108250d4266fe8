"""Decides whether libtpu would look for TPUs on a machine without any, and print warnings about it."""

import importlib.util
import os
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path

PCI_VENDORS = "sys/bus/pci/devices/*/vendor"
GOOGLE_PCI_VENDOR = "0x1ae0"
"""The PCI vendor of TPUs, in the files of all devices. Source: jax/_src/hardware_utils.py."""

TPU_FILES = ("dev/accel*", "dev/vfio/[0-9]*")
"""The devices of TPUs, by generation. Source: https://docs.cloud.google.com/tpu/docs/run-in-container."""

GPU_FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg", "dev/kfd")
"""The devices of GPUs of NVIDIA, also in containers and WSL2, and of AMD. Source: jax/_src/hardware_utils.py, ROCm."""

SETTINGS = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT")
"""The variables by which a user chooses what JAX starts; libtpu itself sets TPU_LIBRARY_PATH when it is imported."""

GPU_PLUGINS = ("xla_cuda", "xla_rocm")


def has_only_cpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether libtpu is installed and JAX can only run on CPUs, by the devices below `root`.

    False if the user has chosen a platform, or if another plugin of JAX is installed, whose devices are unknown here.

    Example:
      >>> has_only_cpus(environ={"JAX_PLATFORMS": "tpu"})
      False
    """
    if any(environ.get(name) for name in SETTINGS) or importlib.util.find_spec("libtpu") is None:
        return False
    if has_device(root, (*TPU_FILES, *GPU_FILES)):
        return False
    vendors = {path.read_text().strip() for path in root.glob(PCI_VENDORS)}
    return GOOGLE_PCI_VENDOR not in vendors and not _other_plugins()


def has_device(root: Path, patterns: Iterable[str]) -> bool:
    """Returns whether a device with one of these names is below `root`."""
    return any(any(root.glob(pattern)) for pattern in patterns)


def _other_plugins() -> list[str]:
    """Returns the plugins of JAX for other devices than GPUs."""
    spec = importlib.util.find_spec("jax_plugins")
    places = [] if spec is None else [*(spec.submodule_search_locations or [])]
    modules = [module.name for module in pkgutil.iter_modules(places)]
    return [name for name in modules if not name.startswith(GPU_PLUGINS)]
