"""Conversions between examples or batches, which are pytrees, and their leaves by path."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Leaves = dict[str, np.ndarray]
"""The arrays of one batch, or of one example, by path."""


class BatchLeaf(Protocol):
    """An array of a global batch: a placement of a plan, or an array of an example batch."""

    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class ExampleLeaf:
    """An array of an example batch, or of a smaller batch than the planned one, which has names of its dims."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...] = ()


def described(leaves: Mapping[str, Any]) -> str:
    """Returns the paths, dtypes and shapes of arrays or placements as text.

    Example:
      >>> described({"x": np.zeros((2, 3), np.int32)})
      'x int32[2,3]'
    """
    sizes = {path: ",".join(map(str, leaf.shape)) for path, leaf in leaves.items()}
    return ", ".join(f"{path} {leaf.dtype}[{sizes[path]}]" for path, leaf in leaves.items()) or "nothing"


def flat(item: Any, path: str = "") -> dict[str, Any]:
    """Returns the leaves of a batch by path, as in a program; tuples are flattened, lists are leaves.

    Example:
      >>> flat({"image": {"pixels": 1}, "pair": (2, 3)})
      {'image.pixels': 1, 'pair.0': 2, 'pair.1': 3}
    """
    if not isinstance(item, Mapping | tuple):
        return {path or "batch": item}
    pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
    inner = (flat(value, f"{path}.{key}" if path else str(key)) for key, value in pairs)
    return {leaf: value for part in inner for leaf, value in part.items()}


def nested(like: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """Returns the leaves as a pytree with the structure of `like`; the inverse of `flat`.

    Example:
      >>> nested({"image": {"pixels": None}}, {"image.pixels": 1})
      {'image': {'pixels': 1}}
    """
    if isinstance(like, Mapping):
        return {key: nested(inner, leaves, f"{path}.{key}" if path else str(key)) for key, inner in like.items()}
    if isinstance(like, tuple):
        return tuple(nested(inner, leaves, f"{path}.{i}" if path else str(i)) for i, inner in enumerate(like))
    return leaves[path or "batch"]
