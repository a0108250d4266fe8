"""Restricts conversion of weights to the CPU, and returns freed memory to the operating system."""

import ctypes
import os
from contextlib import suppress
from typing import Annotated

from tyro.conf import arg

ArchitectureFlag = Annotated[str, arg(name="as")]
"""The flag --as."""

M_MMAP_THRESHOLD = -3
"""Parameter of mallopt(3). Source: malloc.h of glibc."""


def use_host_memory() -> None:
    """Selects JAX's CPU backend, and maps large arrays separately.

    Without it, glibc's pools retain a tenth of a model after its arrays are freed.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
