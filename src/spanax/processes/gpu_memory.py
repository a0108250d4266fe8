"""The share of a GPU's memory that JAX takes, which it reads from the environment when it starts."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from spanax.processes.absent_tpu import GPU_FILES, has_device

VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"

SETTINGS = (VARIABLE, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
"""The variables by which a user decides how JAX allocates; it refuses both names of the share together."""

OURS = ".95"
"""The share in processes of Spanax; the rest holds the context of CUDA and the buffers of NCCL."""

DEFAULT_SHARE = 0.75
"""Source: https://docs.jax.dev/en/latest/gpu_memory_allocation.html."""

REPORTED_SHARE = 0.98
"""The least share of a GPU's memory that CUDA reports, of which JAX takes its own. Source: hardware/chips.toml."""


def missing_setting(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, str]:
    """Returns the variable that a process of Spanax sets; none without GPUs, or if the user decides how JAX allocates.

    Args:
      environ: the environment of the process.
      root: the folder with the devices.
    """
    platforms = {*(environ.get("JAX_PLATFORMS") or "gpu").split(",")}
    has_gpus = has_device(root, GPU_FILES) and not platforms.isdisjoint(("gpu", "cuda", "rocm"))
    return {VARIABLE: OURS} if has_gpus and not any(environ.get(name) for name in SETTINGS) else {}


def needed_setting(num_bytes: int, memory_bytes: int) -> dict[str, str]:
    """Returns the variable with which JAX can allocate `num_bytes` of `memory_bytes`; none if it can by default.

    Example:
      >>> needed_setting(58 << 30, 80 << 30), needed_setting(69 << 30, 80 << 30)
      ({}, {'XLA_PYTHON_CLIENT_MEM_FRACTION': '.95'})
    """
    share = num_bytes / (REPORTED_SHARE * memory_bytes)
    value = f"{min(math.ceil(100 * share), 99) / 100:.2f}"[1:]
    return {} if share <= DEFAULT_SHARE else {VARIABLE: max(OURS, value)}


def setting_text(variables: Mapping[str, str], *, is_set: bool) -> str:
    """Returns that the variable is set, or where to set it.

    Example:
      >>> setting_text({VARIABLE: ".95"}, is_set=True)
      'XLA_PYTHON_CLIENT_MEM_FRACTION=.95 is set: by default, JAX takes 75 % of a GPU'
      >>> setting_text({VARIABLE: ".99"}, is_set=False)
      'set XLA_PYTHON_CLIENT_MEM_FRACTION=.99, also for `spanax train` and `launch`, which set .95'
    """
    assigned = f"{VARIABLE}={variables[VARIABLE]}"
    reason = f"by default, JAX takes {100 * DEFAULT_SHARE:.0f} % of a GPU"
    if is_set:
        return f"{assigned} is set: {reason}"
    if variables[VARIABLE] > OURS:
        return f"set {assigned}, also for `spanax train` and `launch`, which set {OURS}"
    return f"in your own loop, set {assigned}: {reason} (`spanax train` and `launch` set {OURS})"
