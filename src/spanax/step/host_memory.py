"""Transfers between host and device memory inside a compiled function, of the state that a plan offloads."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from spanax.plan.sharding.placement import DEVICE, HOST


def to_device(arrays: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Returns traced arrays with those in host memory copied to the devices, under the same sharding."""
    return [
        jax.device_put(array, sharding.with_memory_kind(DEVICE)) if sharding.memory_kind == HOST else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def to_host(arrays: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Returns traced arrays with those that are stored in host memory copied there."""
    return [
        jax.device_put(array, sharding) if sharding.memory_kind == HOST else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
