"""Enumerates every layout of a program on a cluster, as arrays; counts invalid layouts by reason."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spanax.errors import IdleAxisError, SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.hardware.torus import divisors
from spanax.plan.layout import LAST_RESORT_AXES, SPATIAL_AXES, TENSOR_AXES, Layout
from spanax.plan.presets import STORED, layout_of
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.assign import Pins, pinned_to
from spanax.plan.sharding.resolve import Resolver, annotated, axes_of, resolve
from spanax.plan.sharding.size_decisions import size_decisions
from spanax.trace.program import Program

AXES = ("data", "fsdp", "expert", "context", "model", "groups")
"""The mesh axes inside a stage, slowest first: the last axis uses the fastest links."""

STORING = {"fsdp": ("param", "gradient", "optimizer")} | STORED
"""The arrays that a layout with an `fsdp` axis shards over it in storage, by name."""

Rejections = Counter[Reason]
"""The number of rejected layouts by reason."""

Key = tuple[tuple[str, frozenset[tuple[int, int]]], ...]
"""The classes that each mesh axis of several devices shards, with their ranks."""

Row = tuple[int, ...]
"""A number of stages and the sizes of AXES."""


@dataclass(frozen=True, eq=False)
class Family:
    """Meshes with the same resolved layout: one pass over the program prices all of them.

    The resolved layout is the same where several devices are along the same axes, computation shards the same dims, and
    all decisions by size are equal (`size_decisions`). The mesh of `resolver` is one of them. `sizes` has shape
    [AXES, meshes]; `num_stages` has shape [meshes].
    """

    storing: str
    sequence: bool
    resolver: Resolver
    sizes: np.ndarray
    num_stages: np.ndarray

    def select(self, columns: Sequence[int] | np.ndarray) -> "Family":
        """Returns the family of some of the meshes."""
        sizes = self.sizes[:, columns]
        resolver = self.resolver
        if sizes.size:
            resolver = replace(resolver, mesh=MeshShape(tuple(zip(AXES, sizes[:, 0].tolist(), strict=True))))
        return replace(self, resolver=resolver, sizes=sizes, num_stages=self.num_stages[columns])


def families(
    program: Program,
    cluster: Cluster,
    batch_size: int,
    rejected: Rejections,
    pins: Pins | None = None,
    model: int | None = None,
    *,
    groups: int = 1,
    is_open: bool = True,
) -> list[Family]:
    """Returns every mesh of a cluster under every storage and sequence option, grouped by resolved layout.

    Args:
      program: the program to train.
      cluster: the devices; every mesh uses all of them.
      batch_size: examples per step; every mesh must divide it.
      rejected: counts rejected layouts by reason.
      pins: the mesh axes requested for single axes, in every layout.
      model: the size of `model` in every mesh; by default, any.
      groups: a size of `groups` to enumerate too, where the keys of the program suggest none.
      is_open: whether images are sharded only where the batch has at most one for each device.
    """
    tensor = 1 + AXES.index("model")
    most = _most_in_context(program, is_open and batch_size > cluster.num_devices)
    rows = _meshes(program, cluster.num_devices, most, pins or {}, groups)
    meshes = [row for row in rows if model in (None, row[tensor])]
    keys: dict[tuple[object, ...], Key | Reason] = {}
    result = []
    optimizer = any(leaf.kind == "optimizer" and leaf.shape for leaf in program.leaves)
    for storing in STORING:
        for sequence in (False, True):
            options = _Options(program, storing, sequence, pins or {})
            by_key = defaultdict[Key, list[Row]](list)
            for stages, *sizes in meshes:
                by_axis = dict(zip(AXES, sizes, strict=True))
                if (storing != "fsdp" and by_axis["fsdp"] == 1) or (sequence and by_axis["model"] == 1):
                    continue
                if storing != "fsdp" and not optimizer:
                    rejected[Reason(Code.NOTHING_STORED)] += 1
                    continue
                if batch_size % (by_axis["data"] * by_axis["fsdp"] * by_axis["expert"]):
                    rejected[Reason(Code.BATCH_NOT_DIVISIBLE)] += 1
                    continue
                # Sharding in computation depends neither on storage nor on stages.
                key = keys.get((sequence, *sizes)) or keys.setdefault((sequence, *sizes), _key(options, sizes))
                if isinstance(key, Reason):
                    rejected[key] += 1
                else:
                    by_key[key].append((stages, *sizes))
            result += [family for rows in by_key.values() for family in _resolved_alike(options, rows, rejected)]
    return result


def layout_on(storing: str, sequence: bool, mesh: MeshShape) -> Layout:
    """Returns the layout of a family on one mesh, with the name of its preset."""
    layout = layout_of(mesh, STORING[storing])
    # `hsdp` shards all arrays in storage; with fewer, the name lists the parts.
    name = layout.name.replace("hsdp", "data+fsdp").replace("fsdp", storing) if storing != "fsdp" else layout.name
    if sequence:
        return replace(layout, name=name + "+seq", sequence_axis="model")
    return replace(layout, name=name)


def storing_of(layout: Layout) -> str:
    """Returns what a layout stores sharded, as a key of STORING."""
    stored = {kind for kind in STORING["fsdp"] if layout.stored(kind)}
    return next((name for name, kinds in STORING.items() if stored == {*kinds}), "fsdp")


def mesh_of(sizes: Sequence[int]) -> MeshShape:
    """Returns a mesh of AXES without axes of one device, or `data=1`."""
    axes = tuple((axis, int(size)) for axis, size in zip(AXES, sizes, strict=True) if size > 1)
    return MeshShape(axes or (("data", 1),))


def is_standard(mesh: MeshShape) -> bool:
    """Whether a mesh has only AXES, in order: a search prices only such meshes."""
    positions = [AXES.index(axis) if axis in AXES else -1 for axis, size in mesh.axes if size > 1]
    return positions == sorted(positions) and -1 not in positions


def num_groups(program: Program, model: int) -> int:
    """Returns the size of `groups` that leaves `model` a device per key and value of each head; 0 if there is none.

    Args:
      program: the program.
      model: the number of devices along both axes.
    """
    axes = program.step.axes
    for label, found in axes.groups.items():
        groups, rest = divmod(model, axes.ways[label])
        if groups > 1 and not rest and all(axes.ways[each] % groups == 0 for each in found):
            return groups
    return 0


def _meshes(program: Program, num_devices: int, context: int, pins: Pins, requested: int) -> Iterator[tuple[int, ...]]:
    """Yields (stages, *sizes of AXES) with a product of `num_devices`, for axes that can shard the program."""
    names = {axis.name: axis.ways for axis in program.axes}
    uses = {*names, *program.step.axes.uses.values()}
    num_layers = program.step.layer_carry[1]
    is_pinned = any("model" in pinned_to(pin) for pin in pins.values())
    limits = {
        "expert": names.get("experts", 1),
        "context": context,
        "model": num_devices if is_pinned or uses.intersection(TENSOR_AXES + LAST_RESORT_AXES) else 1,
    }
    for stages in divisors(num_devices):
        if stages > 1 and stages > num_layers:
            continue
        for data in divisors(num_devices // stages):
            for fsdp in divisors(num_devices // stages // data):
                rest = num_devices // stages // data // fsdp
                for expert in divisors(rest):
                    for context in divisors(rest // expert):
                        model = rest // expert // context
                        if (
                            limits["expert"] % expert == 0
                            and limits["context"] % context == 0
                            and limits["model"] % model == 0
                        ):
                            for groups in sorted({1, requested, num_groups(program, model) or 1}):
                                if model % groups == 0:
                                    yield stages, data, fsdp, expert, context, model // groups, groups


def _most_in_context(program: Program, has_many: bool) -> int:
    """Returns a multiple of the devices that shard sequences, or images; of `has_many` images, each has its own."""
    if any(axis.name == "seq" for axis in program.axes):
        return math.gcd(*(axis.ways for axis in program.axes if axis.name == "seq"))
    labels = {label for name in SPATIAL_AXES for label in program.step.labels_by_name.get(name, ())}
    ways = [program.step.axes.ways[label] for label in labels & program.step.spatial_labels]
    return 1 if has_many else math.lcm(*ways)


@dataclass(frozen=True, eq=False)
class _Options:
    """The options of a layout that do not depend on the mesh."""

    program: Program
    storing: str
    sequence: bool
    pins: Pins


def _key(options: _Options, sizes: Sequence[int]) -> Key | Reason:
    """Returns the classes that each mesh axis shards, or the reason for a rejection."""
    mesh = mesh_of(sizes)
    if any(not set(pinned_to(pin)).issubset(mesh.names) for pin in options.pins.values()):
        return Reason(Code.PIN_NOT_IN_MESH)
    try:
        assignment = resolve(options.program, layout_on("fsdp", options.sequence, mesh), mesh, options.pins).assignment
        for leaf in options.program.leaves:
            annotated(leaf, mesh)
    except IdleAxisError:
        return Reason(Code.IDLE_AXIS)
    except SpanaxError:
        return Reason(Code.SIZE_NOT_DIVISIBLE)  # all other errors of resolve()
    return tuple((axis, frozenset(ranks.items())) for axis, ranks in assignment.ranks.items())


def _resolved_alike(options: _Options, rows: Sequence[Row], rejected: Rejections) -> list[Family]:
    """Returns the families of meshes with several devices along the same axes: those with equal decisions by size."""
    sizes = np.asarray(rows, int).T[1:]
    decisions = size_decisions(_resolver(options, rows[0][1:]), sizes)
    result = []
    _, family_of = np.unique(decisions, axis=1, return_inverse=True)
    family_of = family_of.reshape(-1)
    for number in range(family_of.max(initial=-1) + 1):
        members = [rows[column] for column in np.flatnonzero(family_of == number).tolist()]
        resolver = _resolver(options, members[0][1:])
        table = np.asarray(members, int).T
        if table[1 + AXES.index("fsdp"), 0] > 1 and not _stores(resolver):
            rejected[Reason(Code.NOTHING_STORED)] += len(members)
        else:
            result.append(Family(options.storing, options.sequence, resolver, table[1:], table[0]))
    return result


def _stores(resolver: Resolver) -> bool:
    """Returns whether storage shards some leaf further than computation, or than computation along the batch would."""
    program = resolver.program
    classes = resolver.program.step.axes.classes
    axes = resolver.layout.stored("optimizer")
    return any(
        resolver.stored(used, labels, leaf.shape, "optimizer") != used or not axes_of(used).isdisjoint(axes)
        for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False)
        if leaf.shape
        for labels in [classes[value]]
        for used in [resolver.used(labels, leaf.shape)]
    )


def _resolver(options: _Options, sizes: Sequence[int]) -> Resolver:
    mesh = MeshShape(tuple(zip(AXES, map(int, sizes), strict=True)))
    return resolve(options.program, layout_on(options.storing, options.sequence, mesh), mesh, options.pins)
