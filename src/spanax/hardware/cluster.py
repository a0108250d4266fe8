"""`Cluster`: the number and kind of devices, their interconnect, and their memory."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanax.errors import ArgumentError, ClusterError
from spanax.hardware.chip import Chip
from spanax.hardware.chips import chip_named, chip_names, chip_of_kind, file_text, read_file
from spanax.hardware.slices import check_shape, default_shape, shape_text
from spanax.processes.gpu_memory import needed_setting
from spanax.processes.processes import join_group

MAX_DEVICES = 1 << 20
"""The maximum number of devices, since all factorizations are enumerated: ten times the largest existing cluster."""

MACHINES: dict[str, tuple[str, tuple[int, ...]]] = {
    "a2-highgpu-{}g": ("a100-40gb", (1, 2, 4, 8)),
    "a2-ultragpu-{}g": ("a100-80gb", (1, 2, 4, 8)),
    "a3-highgpu-{}g": ("h100", (1, 2, 4, 8)),
    "a3-megagpu-{}g": ("h100", (8,)),
    "a3-ultragpu-{}g": ("h200", (8,)),
    "a4-highgpu-{}g": ("b200", (8,)),
    "p3.2xlarge": ("v100-16gb", (1,)),
    "p3.8xlarge": ("v100-16gb", (4,)),
    "p3.16xlarge": ("v100-16gb", (8,)),
    "p3dn.24xlarge": ("v100-32gb", (8,)),
    "p4d.24xlarge": ("a100-40gb", (8,)),
    "p4de.24xlarge": ("a100-80gb", (8,)),
    "p5.48xlarge": ("h100", (8,)),
    "p5e.48xlarge": ("h200", (8,)),
    "p5en.48xlarge": ("h200", (8,)),
    "p6-b200.48xlarge": ("b200", (8,)),
    "standard_nd96asr_v4": ("a100-40gb", (8,)),
    "standard_nd96amsr_a100_v4": ("a100-80gb", (8,)),
    "standard_nd96isr_h100_v5": ("h100", (8,)),
    "standard_nd96isr_h200_v5": ("h200", (8,)),
    "ct4p-hightpu-{}t": ("v4", (4,)),
    "ct5lp-hightpu-{}t": ("v5e", (1, 4, 8)),
    "ct5p-hightpu-{}t": ("v5p", (4,)),
    "ct6e-standard-{}t": ("v6e", (1, 4, 8)),
}
"""Machine types of Google Cloud, AWS and Azure: the chip, and its numbers per machine. Source: their documentation."""

CORES = {"v3": 1, "v4": 2, "v5e": 1, "v5litepod": 1, "v5p": 2, "v6e": 1}
"""TPUs whose slices are named `v5p-128`, and what that number counts per device: TensorCores, except on v5e and v6e."""

TYPES = {kind.format(count): (chip, count) for kind, (chip, counts) in MACHINES.items() for count in counts}


@dataclass(frozen=True)
class Cluster:
    """A homogeneous cluster. `memory_bytes` is the usable memory per device; None means unknown.

    `shape` is (nodes, devices per node), or for a torus the number of chips along each dim of one of the `num_slices`
    slices. `file` is the cluster file it was read from. `str` round-trips: `cluster(str(c)) == c`.

    Example:
      >>> print(cluster("v5p", 64), cluster("h100", 64), cluster("cpu", 8))
      v5p:4x4x4 h100:8x8 cpu:8
    """

    chip: Chip
    num_devices: int
    memory_bytes: int | None = None
    shape: tuple[int, ...] = ()
    num_slices: int = 1
    file: str = ""

    def __str__(self) -> str:
        return f"{self.file or self.chip.name}:{self.size}"

    @property
    def size(self) -> str:
        """The part of its name after the chip: `8`, `2x8`, or `16x16:2` for two slices."""
        nodes_of_one = not self.is_torus and (not self.shape or self.shape[0] == 1)
        shape = str(self.num_devices) if nodes_of_one else shape_text(self.shape)
        return f"{shape}:{self.num_slices}" if self.num_slices > 1 else shape

    @property
    def adds_first(self) -> bool:
        """Whether XLA adds partial sums before their all-reduce on this platform; on CPUs it does not."""
        return not self.chip.shared

    @property
    def narrows_first(self) -> bool:
        """Whether XLA converts a sum to a narrower dtype before its all-reduce on this platform; on TPUs it does."""
        return self.is_torus

    @property
    def expands_ragged(self) -> bool:
        """Whether ragged matmuls are masked matmuls before they are partitioned on this platform; on CPUs they are."""
        return self.chip.shared

    @property
    def is_torus(self) -> bool:
        """Whether the devices are connected as a torus, not through a switch."""
        return self.chip.inside is not None and self.chip.inside.kind == "torus"

    @property
    def platform(self) -> str:
        """The name of the platform in JAX: `cpu`, `tpu` or `gpu`."""
        if self.chip.shared:
            return "cpu"
        return "tpu" if self.is_torus else "gpu"

    def memory_setting(self, num_bytes: int) -> dict[str, str]:
        """Returns the variable with which JAX can allocate `num_bytes` of each GPU; none if it can by default."""
        memory_bytes = self.chip.memory_bytes
        return needed_setting(num_bytes, memory_bytes) if self.platform == "gpu" and memory_bytes else {}

    @property
    def devices_per_node(self) -> int:
        """The number of devices that the inner link connects: those of a node or a slice."""
        if self.is_torus:
            return self.num_devices // self.num_slices
        return self.shape[-1] if self.shape else self.num_devices


def cluster_of(name: "Cluster | str", argument: str = "cluster") -> Cluster:
    """Returns the cluster with this name, or the value itself if it is a Cluster.

    Args:
      name: a Cluster, or its name.
      argument: the name of the argument in an error.

    Raises:
      SpanaxError: as `cluster`, or the type is another.

    Example:
      >>> cluster_of("cpu:8") == cluster_of(cluster("cpu:8"))
      True
    """
    if not isinstance(name, str | Cluster):
        raise ArgumentError.of(argument, name, f'{argument}="cpu:8", or {argument}=spanax.local()')
    return cluster(name) if isinstance(name, str) else name


def cluster(name: str, num_devices: int | None = None) -> Cluster:
    """Returns the cluster with this name, without accessing a device.

    Args:
      name: a chip and a size: `a100-80gb:64` (devices, in nodes of the default size), `h100:8x8` (nodes x devices per
        node), `v5p:4x4x8` (chips of a torus), `v5e:16x16:2` (two slices), `cpu:8`; a machine type or a slice of a
        cloud: `p5.48xlarge`, `a3-highgpu-8g:4` (four machines), `v5litepod-16`, `v5p-128` (TensorCores), `8xH100`; a
        GPU alone, which is one device: `rtx4090`; or a cluster file: `mine.toml`, `mine.toml:8x8`.
      num_devices: replaces the size after the colon.

    Raises:
      SpanaxError: the chip is unknown, or does not exist in this size.
      DataError: the file cannot be read, or is not TOML.

    Example:
      >>> cluster("cpu:8").num_devices, cluster("h100:2x4").shape, cluster("trillium:256").shape
      (8, (2, 4), (16, 16))
      >>> print(cluster("8xH100"), cluster("v5p-128"), cluster("rtx4090"))
      h100:8 v5p:4x4x4 rtx4090:1
    """
    path = re.fullmatch(r"(?P<file>.+\.toml)(?::(?P<size>.*))?", name)
    if path:
        file = path["file"]
        size = path["size"]
        chip, written = read_file(file)
        size = size or written or ""
    else:
        file = ""
        head, _, size = cluster_name(name).partition(":")
        chip = chip_named(head, where=f"cluster '{name}'")
        is_gpu = not chip.shared and chip.inside is not None and chip.inside.kind != "torus"
        size = "1" if is_gpu and head == cluster_name(name) else size
    if num_devices is not None:
        size = str(num_devices)
    return _sized(chip, size, name, file)


def cluster_name(name: str) -> str:
    """Returns the name of a cluster, `chip:size`, for that of a machine type or slice; other names are unchanged.

    Raises:
      ClusterError: the name of a slice counts half a chip.

    Example:
      >>> [cluster_name(name) for name in ("8xH100", "h100x8", "p5.48xlarge", "a3-highgpu-8g:4", "ct6e-standard-4t:4")]
      ['h100:8', 'h100:8', 'h100:8', 'h100:4x8', 'v6e:16']
      >>> [cluster_name(name) for name in ("v5litepod-16", "v5p-128", "v4-32:2", "h100:2x8")]
      ['v5litepod:16', 'v5p:64', 'v4:16:2', 'h100:2x8']
    """
    text = name.lower().replace(" ", "")
    kind, _, machines = text.partition(":")
    if kind in TYPES and (machines or "1").isdecimal():
        chip, count = TYPES[kind]
        if kind.startswith("ct") or not machines:
            return f"{chip}:{count * int(machines or 1)}"
        return f"{chip}:{machines}x{count}"
    if counted := re.fullmatch(r"(\d+)x([a-z].*)|(.+)x(\d+)", text):
        chip, count_text = (counted[2], counted[1]) if counted[2] else (counted[3], counted[4])
        return f"{chip}:{count_text}" if chip in chip_names() else name
    if named := re.fullmatch(r"(\w+)-(\d{1,9})(:\d+)?", text):
        chip = named[1]
        number = int(named[2])
        per_device = CORES.get(chip, 0)
        if per_device and number % per_device:
            message = f"'{name}' counts TensorCores, and a chip has {per_device}."
            raise ClusterError(message, fix=f"{chip}-{number + 1}")
        return f"{chip}:{number // per_device}{named[3] or ''}" if per_device else name
    return name


def resized(machine: Cluster, size: str) -> Cluster:
    """Returns a cluster of another size with the chip of the catalog or of the cluster file.

    Raises:
      SpanaxError: the chip does not exist in this size.

    Example:
      >>> resized(cluster("h100:2x8"), "8").num_devices
      8
    """
    return machine if size == machine.size else cluster(f"{machine.file or machine.chip.name}:{size}")


def cluster_text(machine: Cluster) -> str:
    """Returns the text of a cluster file from which `cluster` returns an equal cluster.

    Example:
      >>> print(cluster_text(cluster("h100:2x8")), end="")
      like = "h100"
      shape = "2x8"
    """
    chip = machine.chip
    if chip.shared:  # the file describes the host, and the memory is that of the host on which it is read
        chip = replace(chip, memory_bytes=None, usable_bytes=None).divided(1 / machine.devices_per_node)
    return file_text(chip, machine.size)


def is_of_kind(machine: Cluster, device_kind: str) -> bool:
    """Returns whether the devices of a cluster are those with a `device_kind` in JAX.

    Example:
      >>> is_of_kind(cluster("v5e:16"), "TPU v5 lite"), is_of_kind(cluster("v5e:16"), "cpu")
      (True, False)
    """
    return device_kind in (*machine.chip.device_kinds, machine.chip.name)


def local(devices: Sequence[Any] | None = None) -> Cluster:
    """Returns the cluster of `devices`, by default `jax.devices()`; simulated CPU devices share the host's memory.

    By default, joins the process group that the environment defines (docs/hosts.md) if JAX is not initialized.

    The chip is the one in the catalog whose `device_kind` matches; of any other chip only the memory is known.

    Example:
      >>> local().chip.name
      'cpu'
    """
    import jax

    if devices is None:
        join_group()
    devices = list(jax.devices() if devices is None else devices)
    chip = chip_of_kind(devices[0].device_kind)
    if chip.inside is not None and chip.inside.kind == "torus":
        layout = _local_slices(chip, devices)
    else:
        layout = _nodes(chip, _local_nodes(devices), "")
    limits = [] if layout.chip.shared else [(device.memory_stats() or {}).get("bytes_limit") for device in devices[:1]]
    return replace(layout, memory_bytes=limits[0]) if any(limits) else layout


def _sized(chip: Chip, size: str, name: str, file: str) -> Cluster:
    match = re.fullmatch(r"(?P<shape>\d{1,18}(?:x\d{1,18})*)(?::(?P<slices>\d{1,18}))?", size.replace(" ", ""))
    shape = tuple(map(int, match["shape"].split("x"))) if match else ()
    slices = int(match["slices"] or 1) if match else 0
    torus = chip.inside is not None and chip.inside.kind == "torus"
    if math.prod(shape) * slices > MAX_DEVICES:
        raise ClusterError(f"cluster '{name}' has more than {MAX_DEVICES:,} devices.", fix=f"{file or chip.name}:8")
    if not shape or math.prod(shape) < 1 or slices < 1:
        example = "4x4x4"[: 2 * len(chip.inside.max_shape) - 1] if chip.inside and torus else "8"
        raise ClusterError(f"cluster '{name}' has no valid number of devices.", fix=f"{file or chip.name}:{example}")
    if torus:
        return _slices(chip, shape, slices, name, file)
    if slices > 1 or len(shape) > 2:
        raise ClusterError(
            f"cluster '{name}': {chip.name} comes in nodes, not in slices.",
            fix=f"{file or chip.name}:{slices * math.prod(shape[:-1])}x{shape[-1]} (nodes x devices per node)",
        )
    return _nodes(chip, shape, name, file)


def _nodes(chip: Chip, shape: tuple[int, ...], name: str, file: str = "") -> Cluster:
    limit = chip.inside.max_devices if chip.inside and chip.inside.max_devices else None
    head = file or chip.name
    if len(shape) == 1:
        count = shape[0]
        per_node = count if limit is None or count <= limit else limit
        if count % per_node:
            lower = count // per_node * per_node
            upper = -(-count // per_node) * per_node
            raise ClusterError(
                f"{count} devices of {chip.name} do not fill nodes of {per_node}.",
                where=f"cluster '{name}'",
                fix=f"{head}:{lower}, {head}:{upper}, or nodes x devices per node: {head}:2x{per_node // 2}",
            )
        shape = (count // per_node, per_node)
    if limit is not None and shape[1] > limit:
        raise ClusterError(
            f"a node of {chip.name} has at most {limit} devices, and {shape_text(shape)} requests {shape[1]}.",
            where=f"cluster '{name}', nodes x devices per node",
            fix=f"{head}:{-(-math.prod(shape) // limit)}x{limit}",
        )
    return _filled(chip, math.prod(shape), shape, 1, file)


def _slices(chip: Chip, shape: tuple[int, ...], slices: int, name: str, file: str = "") -> Cluster:
    if len(shape) == 1:
        if shape[0] % chip.devices_per_chip:
            raise ClusterError(
                f"{shape[0]} devices of {chip.name} do not fill chips of {chip.devices_per_chip}.",
                where=f"cluster '{name}'",
                fix=f"{file or chip.name}:{shape[0] + 1}",
            )
        shape = default_shape(chip, shape[0] // chip.devices_per_chip, name)
    check_shape(chip, shape, name)
    return _filled(chip, math.prod(shape) * chip.devices_per_chip * slices, shape, slices, file)


def _filled(chip: Chip, num_devices: int, shape: tuple[int, ...], slices: int, file: str) -> Cluster:
    if chip.shared and chip.memory_bytes is None:
        host = _host_bytes()
        chip = replace(chip, memory_bytes=host, usable_bytes=host)
    chip = chip.divided(shape[-1])
    return Cluster(chip, num_devices, chip.usable_bytes, shape, slices, file)


def _local_nodes(devices: Sequence[Any]) -> tuple[int, ...]:
    """Returns (nodes, devices per node) by NVLink domain, or else by process, if all nodes are equal."""
    for key in ("slice_index", "process_index"):
        places = [getattr(device, key, None) for device in devices]
        counts = {places.count(place) for place in places}
        if None not in places and len(counts) == 1 and (counts != {1} or len(devices) == 1):
            per_node = counts.pop()
            return len(devices) // per_node, per_node
    return 1, len(devices)


def _local_slices(chip: Chip, devices: Sequence[Any]) -> Cluster:
    """Returns the cluster with the slices that the coordinates of the devices imply, of any shape."""
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    coords = [tuple(device.coords) for device in devices]
    shape = tuple(max(dim) - min(dim) + 1 for dim in zip(*coords, strict=True))
    dims = len(chip.inside.max_shape) if chip.inside else 0
    if math.prod(shape[dims:]) == 1:  # JAX has three coordinates on a 2D torus too
        shape = shape[:dims]
    per_chip = len(devices) // (slices * math.prod(shape)) or 1
    if math.prod(shape) * slices * per_chip != len(devices) or len(shape) != dims:
        shape = (len(devices) // slices // per_chip, *(1,) * (dims - 1))
    return _filled(replace(chip, devices_per_chip=per_chip), len(devices), shape, slices, "")


def _host_bytes() -> int | None:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
