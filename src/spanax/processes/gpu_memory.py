"""The share of a GPU's memory that JAX takes, which it reads from the environment when it starts."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from spanax.processes.absent_tpu import GPU_FILES, has_device

VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"

SETTINGS = (VARIABLE, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
"""The variables by which a user decides how JAX allocates; it refuses both names of the share together."""

DEFAULT_SHARE = 0.75
"""Source: https://docs.jax.dev/en/latest/gpu_memory_allocation.html."""

SHARE = 0.95
"""The share in processes of Spanax; the rest holds the context of CUDA and the buffers of NCCL."""

MAX_SHARE = 0.99

REPORTED_SHARE = 0.98
"""The least share of a GPU's memory that CUDA reports, of which JAX takes its own. Source: hardware/chips.toml."""

DEFAULT = f"by default, JAX takes {100 * DEFAULT_SHARE:.0f} % of a GPU"


def setting(share: float = SHARE) -> dict[str, str]:
    """Returns the variable that sets the share.

    Example:
      >>> setting()
      {'XLA_PYTHON_CLIENT_MEM_FRACTION': '.95'}
    """
    return {VARIABLE: f"{share:.2f}".lstrip("0")}


def missing_setting(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, str]:
    """Returns the setting that a process of Spanax needs: none without GPUs, or if the user decides how JAX allocates.

    Args:
      environ: the environment of the process.
      root: the folder with the devices.
    """
    platforms = {*(environ.get("JAX_PLATFORMS") or "gpu").split(",")}
    has_gpus = has_device(root, GPU_FILES) and not platforms.isdisjoint(("gpu", "cuda", "rocm"))
    return setting() if has_gpus and not any(environ.get(name) for name in SETTINGS) else {}


def needed_setting(num_bytes: int, memory_bytes: int) -> dict[str, str]:
    """Returns the setting with which JAX can allocate `num_bytes` of `memory_bytes`; none if it can by default.

    Example:
      >>> needed_setting(58 << 30, 80 << 30), needed_setting(69 << 30, 80 << 30)
      ({}, {'XLA_PYTHON_CLIENT_MEM_FRACTION': '.95'})
    """
    share = num_bytes / (REPORTED_SHARE * memory_bytes)
    return {} if share <= DEFAULT_SHARE else setting(min(max(SHARE, math.ceil(100 * share) / 100), MAX_SHARE))


def setting_text(variables: Mapping[str, str]) -> str:
    """Returns the setting, and why it is set.

    Example:
      >>> setting_text(setting())
      'XLA_PYTHON_CLIENT_MEM_FRACTION=.95 is set: by default, JAX takes 75 % of a GPU'
    """
    return f"{_assigned(variables)} is set: {DEFAULT}"


def needed_text(variables: Mapping[str, str]) -> str:
    """Returns where a user needs to set it.

    Example:
      >>> needed_text(setting(0.97)).partition(" (")[0]
      'in your own loop, set XLA_PYTHON_CLIENT_MEM_FRACTION=.97: by default, JAX takes 75 % of a GPU'
    """
    ours = setting()[VARIABLE]
    return f"in your own loop, set {_assigned(variables)}: {DEFAULT} (`spanax train` and `launch` set {ours})"


def _assigned(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())
