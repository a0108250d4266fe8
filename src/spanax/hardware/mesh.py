"""The names and sizes of the axes of a device mesh, without devices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spanax.errors import ArgumentError, DeviceCountError, MeshError, RangeError
from spanax.processes.processes import join_group
from spanax.units import whole_number

if TYPE_CHECKING:
    from jax.sharding import Mesh

CANONICAL_AXES = ("pipe", "data", "fsdp", "expert", "context", "model", "groups")

ALIASES = {"pp": "pipe", "dp": "data", "ep": "expert", "cp": "context", "sp": "context", "tp": "model"}
"""Abbreviations of mesh axes in text."""


@dataclass(frozen=True)
class MeshShape:
    """The names and sizes of mesh axes, slowest varying first, as for `jax.make_mesh`.

    Example:
      >>> MeshShape.of({"data": 4, "model": 2})
      data=4,model=2
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(sizes: "Mapping[str, int] | str | MeshShape | Mesh") -> "MeshShape":
        """Returns the mesh shape of `{"data": 4}`, `"data=4,model=2"`, or of a `jax.sharding.Mesh` that it builds.

        In text, `dp`, `tp`, `cp` (or `sp`), `ep` and `pp` stand for `data`, `model`, `context`, `expert` and `pipe`.

        Raises:
          SpanaxError: a size is not a positive integer, an axis is repeated, or the type is another.

        Example:
          >>> MeshShape.of("data=4,model=2").size
          8
          >>> MeshShape.of("dp=4,tp=2")
          data=4,model=2
        """
        if isinstance(sizes, MeshShape):
            return sizes
        if not isinstance(sizes, str | Mapping):
            return _of_devices(sizes)
        pairs = _parse(sizes) if isinstance(sizes, str) else [(str(k), v) for k, v in sizes.items()]
        for name, size in pairs:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise RangeError(
                    f"mesh axis '{name}' has size {size!r}; it must be an integer >= 1.",
                    fix="sizes whose product is the number of devices",
                )
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise MeshError(f"mesh axis '{name}' is repeated.", where=f"mesh {names}")
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
        """Returns the number of shards of a dim that is sharded over `axes`; axes not in the mesh have size 1."""
        return math.prod([self._sizes.get(axis, 1) for axis in axes])

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def build(self, devices: Sequence[Any] | None = None) -> "Mesh":
        """Returns the `jax.sharding.Mesh` of the first `size` of `devices`, by default of the process group it joins.

        Raises:
          SpanaxError: there are fewer than `size` devices, or the process group cannot be joined.
        """
        import jax

        if devices is None:
            join_group()
        devices = list(jax.devices() if devices is None else devices)
        if len(devices) < self.size:
            raise DeviceCountError(
                f"the mesh needs {self.size} devices, and there are {len(devices)}.",
                where=f"mesh {self}",
                fix=f"a mesh whose product is {len(devices)}, or {simulated(self.size)} to simulate them on a CPU",
            )
        # Auto axes: plain NNX models (Embed, Dropout) do not support the default Explicit axes.
        kinds = (jax.sharding.AxisType.Auto,) * len(self.axes)
        return jax.sharding.Mesh(self._arranged(devices[: self.size]), self.names, axis_types=kinds)

    def split(self, num_slices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the sizes of the axes within a slice and between slices; the slowest axes are between slices.

        Raises:
          SpanaxError: the number of slices does not divide the first axes.

        Example:
          >>> MeshShape.of("data=4,fsdp=16").split(2)
          ((2, 16), (2, 1))
        """
        within = []
        between = []
        remaining = num_slices
        for _, size in self.axes:
            factor = math.gcd(size, remaining)
            remaining //= factor
            between.append(factor)
            within.append(size // factor)
        if remaining > 1:
            raise DeviceCountError(
                f"{num_slices} slices do not divide the mesh {self}.", fix="a first mesh axis that the slices divide"
            )
        return tuple(within), tuple(between)

    def _arranged(self, devices: Sequence[Any]) -> Any:
        """Returns the devices as an array of the mesh's shape, with torus neighbors adjacent and slices outermost."""
        from jax.experimental import mesh_utils

        num_slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
        # An axis may be part of a physical dim of the torus, which `jax.make_mesh` does not allow.
        if num_slices > 1 and devices[0].platform == "tpu":
            within, between = self.split(num_slices)
            return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
        sizes = tuple(size for _, size in self.axes)
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)

    def __repr__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "one device"


def simulated(num_devices: int) -> str:
    """Returns how a fix names simulated devices: on the command line, and in Python."""
    return f"--devices {num_devices} (in Python: spanax.simulate({num_devices}))"


def _of_devices(mesh: Any) -> MeshShape:
    """Returns the shape of a `jax.sharding.Mesh`; `build` returns a mesh of the same devices, whose axes are Auto.

    Raises:
      SpanaxError: it is of another type, or differs in its devices.
    """
    import jax

    if not isinstance(mesh, jax.sharding.Mesh):
        raise ArgumentError.of("mesh", mesh, 'mesh="fsdp=8", or mesh={"fsdp": 8}')
    shape = MeshShape(tuple(mesh.shape.items()))
    built = shape.build()
    if [*mesh.devices.flat] != [*built.devices.flat]:
        raise MeshError(
            "`mesh` is a jax.sharding.Mesh with other devices, or in another order, than Spanax places on it.",
            where=f"mesh {shape} of devices {_ids(mesh)}; Spanax uses {_ids(built)}",
            fix="mesh=dict(mesh.shape), and objects that are created without a mesh",
        )
    return shape


def _ids(mesh: "Mesh") -> str:
    ids = [device.id for device in mesh.devices.flat]
    return ", ".join(map(str, ids[:8])) + ", ..." * (len(ids) > 8)


def _parse(text: str) -> list[tuple[str, int]]:
    pairs = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, size = (s.strip() for s in part.partition("="))
        number = whole_number(size.removeprefix("-"))
        if not equals or not name or number is None:
            raise MeshError(
                f"cannot read '{part}' as a mesh axis.", where=f"mesh '{text}'", fix="write it like data=4,model=2"
            )
        pairs.append((ALIASES.get(name, name), -number if size.startswith("-") else number))
    return pairs
