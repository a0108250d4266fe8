"""Plans of batches without a program, and what comes out of batches as plain values."""

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from spanax.hardware.mesh import MeshShape
from spanax.plan.sharding.placement import Placement

B, T = 8, 4


def leaf(path: str, shape: tuple[int, ...], dtype: str = "int32", spec: tuple[tuple[str, ...], ...] = ()) -> Placement:
    spec = spec + ((),) * (len(shape) - len(spec))
    return Placement(path, shape, dtype, "batch", (None,) * len(shape), spec, shape, 0, "")


def plan_of(*leaves: Placement, mesh: str = "data=4,model=2") -> Any:
    return SimpleNamespace(mesh=MeshShape.of(mesh), batch=leaves)


TEXT_PLAN = plan_of(*(leaf(path, (B, T), spec=(("data",),)) for path in ("inputs", "targets")))


def values(batch: Any) -> list[Any]:
    return jax.tree.map(lambda array: np.asarray(array).tolist(), batch)


def take(result: Iterator[Any], num: int) -> list[Any]:
    return [values(batch) for batch in itertools.islice(result, num)]


def data_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "spanax-data"}
