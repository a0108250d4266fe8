"""MeshShape: the names and sizes of the mesh axes, slowest first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spanax.displays import display
from spanax.errors import SpanaxError
from spanax.run.distributed.processes import join_group

if TYPE_CHECKING:
    from jax.sharding import Mesh

CANONICAL_AXES = ("pipe", "data", "fsdp", "expert", "context", "model")


@dataclass(frozen=True)
class MeshShape:
    """Mesh axes in order, slowest varying first: what `jax.make_mesh` needs, without a device.

    Example:
      >>> MeshShape.of({"data": 4, "model": 2})
      data=4,model=2
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(sizes: "Mapping[str, int] | str | MeshShape") -> "MeshShape":
        """A mesh shape from `{"data": 4}` or `"data=4,model=2"`.

        Raises:
          SpanaxError: a size is not a positive integer, or an axis comes twice.

        Example:
          >>> MeshShape.of("data=4,model=2").size
          8
        """
        if isinstance(sizes, MeshShape):
            return sizes
        pairs = _parse(sizes) if isinstance(sizes, str) else [(str(k), v) for k, v in sizes.items()]
        for name, size in pairs:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise SpanaxError(
                    f"mesh axis '{name}' has size {size!r}; it takes a whole number from 1.",
                    fix=f"{name}=1, or leave '{name}' out",
                )
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise SpanaxError(f"mesh axis '{name}' is given twice.", where=f"mesh {names}")
        return MeshShape(tuple(pairs))

    @property
    def size(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The axis names, in order."""
        return tuple(name for name, _ in self.axes)

    def ways(self, axes: Sequence[str]) -> int:
        """How many parts a dim split over `axes` has; an axis the mesh lacks counts as 1."""
        return math.prod([self._sizes.get(axis, 1) for axis in axes])

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def build(self, devices: Sequence[Any] | None = None) -> "Mesh":
        """The real mesh, over the first `size` of `devices` (all of the group by default, which is joined first).

        Raises:
          SpanaxError: there are not that many devices, or the group cannot be joined.
        """
        import jax

        if devices is None:
            join_group()
        devices = list(jax.devices() if devices is None else devices)
        if len(devices) < self.size:
            raise SpanaxError(
                f"the mesh takes {self.size} devices and there are {len(devices)}.",
                where=f"mesh {self}",
                fix=f"a mesh whose product is {len(devices)}, or --devices {self.size} to simulate them on a CPU",
            )
        # Auto axes: ordinary NNX models (Embed, Dropout) cannot run under the default Explicit ones.
        kinds = (jax.sharding.AxisType.Auto,) * len(self.axes)
        return jax.sharding.Mesh(self._arranged(devices[: self.size]), self.names, axis_types=kinds)

    def split(self, num_slices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the axes within one slice, and between slices; the slowest axes go between.

        Raises:
          SpanaxError: the slices do not divide the first axes.

        Example:
          >>> MeshShape.of("data=4,fsdp=16").split(2)
          ((2, 16), (2, 1))
        """
        within, between, left = [], [], num_slices
        for _, size in self.axes:
            here = math.gcd(size, left)
            left //= here
            between.append(here)
            within.append(size // here)
        if left > 1:
            raise SpanaxError(
                f"{num_slices} slices do not divide the mesh {self}.", fix="a first mesh axis that the slices divide"
            )
        return tuple(within), tuple(between)

    def _arranged(self, devices: Sequence[Any]) -> Any:
        """The devices as an array of the mesh's shape: neighbours on a torus next to each other, slices outermost."""
        from jax.experimental import mesh_utils

        num_slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
        # An axis may take a part of a dim of the torus; JAX's own make_mesh refuses that.
        if num_slices > 1 and devices[0].platform == "tpu":
            within, between = self.split(num_slices)
            return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
        sizes = tuple(size for _, size in self.axes)
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)

    def _repr_html_(self) -> str | None:
        return display(self)

    def __repr__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "one device"


def _parse(text: str) -> list[tuple[str, int]]:
    pairs = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, size = (s.strip() for s in part.partition("="))
        if not equals or not name or not size.lstrip("-").isdigit():
            raise SpanaxError(
                f"cannot read '{part}' as a mesh axis.", where=f"mesh '{text}'", fix="write it like data=4,model=2"
            )
        pairs.append((name, int(size)))
    return pairs
