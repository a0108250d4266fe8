"""Enumerates every layout of a program on a cluster, as arrays; counts the impossible ones by reason."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spanax.errors import IdleAxisError, SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.hardware.torus import divisors
from spanax.plan.layout import LAST_RESORT_AXES, TENSOR_AXES, Layout
from spanax.plan.presets import STORED, layout_of
from spanax.plan.sharding.assign import Pins
from spanax.plan.sharding.resolve import Resolver, annotated, resolve
from spanax.trace.program import Program

AXES = ("data", "fsdp", "expert", "context", "model")
"""The mesh axes inside a stage, slowest first: the last one runs over the fastest links."""

STORING = {"fsdp": ("param", "gradient", "optimizer")} | STORED
"""What a layout with an `fsdp` axis keeps split over it, by name."""

BATCH = "the batch does not divide the axes that split it"
IDLE = "a mesh axis has nothing to split"
UNEVEN = "a size does not divide"
UNSTORED = "nothing could be stored split"
UNPINNED = "an axis is pinned to a mesh axis that is not there"

Key = dict[str, frozenset[tuple[int, int]]]
Row = tuple[int, ...]
Groups = list[tuple[Key, list[Row]]]


@dataclass(frozen=True, eq=False)
class Family:
    """Meshes on which a layout resolves alike: one walk over the program prices them all.

    The `resolver` splits over every axis that one of the meshes splits over; its own mesh may be none of them. Alike
    means: the same dims are computed split, and each leaf is stored over the same axes, along whichever dim.
    `sizes` has a row for each of AXES and a column for each mesh; `num_stages` goes with the columns.
    """

    storing: str
    sequence: bool
    resolver: Resolver
    sizes: np.ndarray
    num_stages: np.ndarray


def families(
    program: Program, cluster: Cluster, batch_size: int, rejected: Counter[str], pins: Pins | None = None
) -> list[Family]:
    """Every mesh of a cluster's devices under every way to store and split, grouped by how it resolves.

    Args:
      program: what is to be trained.
      cluster: its devices are all used.
      batch_size: examples in a step; every mesh must divide it.
      rejected: counts what was left out, by reason.
      pins: the user's wishes for single axes, kept in all of them.
    """
    meshes = list(_meshes(program, cluster.num_devices, pins or {}))
    keys: dict[tuple[object, ...], Key | str] = {}
    found = []
    optimizer = any(leaf.kind == "optimizer" and leaf.shape for leaf in program.leaves)
    for storing in STORING:
        for sequence in (False, True):
            way, groups = _Way(program, storing, sequence, pins or {}), Groups()
            for stages, *sizes in meshes:
                of = dict(zip(AXES, sizes, strict=True))
                if (storing != "fsdp" and of["fsdp"] == 1) or (sequence and of["model"] == 1):
                    continue
                if storing != "fsdp" and not optimizer:
                    rejected[UNSTORED] += 1
                    continue
                if batch_size % (of["data"] * of["fsdp"] * of["expert"]):
                    rejected[BATCH] += 1
                    continue
                # What is split does not depend on what is stored, nor on the stages.
                key = keys.get((sequence, *sizes)) or keys.setdefault((sequence, *sizes), _key(way, sizes))
                if isinstance(key, str):
                    rejected[key] += 1
                else:
                    _join(groups, key, (stages, *sizes))
            found += [family for key, rows in groups for family in _stored_alike(way, key, rows, rejected)]
    return found


def layout_on(storing: str, sequence: bool, mesh: MeshShape) -> Layout:
    """The layout of a family on one mesh, named as the presets name it."""
    layout = layout_of(mesh, STORING[storing])
    # `hsdp` means that all is stored split; where it is less, its parts are named.
    name = layout.name.replace("hsdp", "data+fsdp").replace("fsdp", storing) if storing != "fsdp" else layout.name
    if sequence:
        return replace(layout, name=name + "+seq", sequence_axis="model")
    return replace(layout, name=name)


def mesh_of(sizes: Sequence[int]) -> MeshShape:
    """A mesh of AXES; axes of one device are left out, unless that leaves none."""
    axes = tuple((axis, int(size)) for axis, size in zip(AXES, sizes, strict=True) if size > 1)
    return MeshShape(axes or (("data", 1),))


def is_standard(mesh: MeshShape) -> bool:
    """Whether a mesh has only AXES, in their order: those are the meshes that a search prices."""
    positions = [AXES.index(axis) if axis in AXES else -1 for axis, size in mesh.axes if size > 1]
    return positions == sorted(positions) and -1 not in positions


def _meshes(program: Program, num_devices: int, pins: Pins) -> Iterator[tuple[int, ...]]:
    """(stages, sizes of AXES) whose product is the number of devices, as far as the program has what they split."""
    names = {axis.name: axis.ways for axis in program.axes}
    uses = {*names, *program.step.axes.uses.values()}
    num_layers = program.step.layer_carry[1]
    is_pinned = any("model" in ((to,) if isinstance(to, str) else to or ()) for to in pins.values())
    may = {
        "expert": names.get("experts", 1),
        "context": math.gcd(*(axis.ways for axis in program.axes if axis.name == "seq")) if "seq" in names else 1,
        "model": num_devices if is_pinned or uses.intersection(TENSOR_AXES + LAST_RESORT_AXES) else 1,
    }
    for stages in divisors(num_devices):
        if stages > 1 and stages > num_layers:
            continue
        for data in divisors(num_devices // stages):
            for fsdp in divisors(num_devices // stages // data):
                left = num_devices // stages // data // fsdp
                for expert in divisors(left):
                    for context in divisors(left // expert):
                        model = left // expert // context
                        if may["expert"] % expert == 0 and may["context"] % context == 0 and may["model"] % model == 0:
                            yield stages, data, fsdp, expert, context, model


@dataclass(frozen=True, eq=False)
class _Way:
    """A way to lay a program out, whatever the mesh."""

    program: Program
    storing: str
    sequence: bool
    pins: Pins


def _key(way: _Way, sizes: Sequence[int]) -> Key | str:
    """Which classes each mesh axis splits; or why it cannot."""
    mesh = mesh_of(sizes)
    if any(axis not in mesh.names for to in way.pins.values() for axis in ((to,) if isinstance(to, str) else to or ())):
        return UNPINNED
    try:
        found = resolve(way.program, layout_on("fsdp", way.sequence, mesh), mesh, way.pins).assignment
        for leaf in way.program.leaves:
            annotated(leaf, mesh)
    except IdleAxisError:
        return IDLE
    except SpanaxError:
        return UNEVEN  # a batch, a pinned axis or an annotation that does not divide: what else resolve() raises
    return {axis: frozenset(ranks.items()) for axis, ranks in found.ranks.items()}


def _join(groups: Groups, key: Key, row: Row) -> None:
    """An axis of one device splits nothing, and so fits whatever others do with it."""
    for known, rows in groups:
        if all(known.get(axis, ranks) == ranks for axis, ranks in key.items()):
            known.update(key)
            rows.append(row)
            return
    groups.append((dict(key), [row]))


def _stored_alike(way: _Way, key: Key, rows: Sequence[Row], rejected: Counter[str]) -> list[Family]:
    """Meshes of one group, apart where a leaf finds a dim to be stored split along on one and not on another."""
    found = []
    for resolver, members in _represented(way, key, rows):
        flags = _storable(resolver, np.asarray(members, int).T[1:])
        for flag in np.unique(flags, axis=1).T:
            alike = [row for row, of in zip(members, flags.T, strict=True) if (of == flag).all()]
            if not flag.any():
                idle = [row for row in alike if row[1 + AXES.index("fsdp")] > 1]
                rejected[UNSTORED] += len(idle)
                alike = [row for row in alike if row not in idle]
            if not alike:
                continue
            for one, same in _represented(way, key, alike, flag):
                table = np.asarray(same, int).T
                found.append(Family(way.storing, way.sequence, one, table[1:], table[0]))
    return found


def _represented(
    way: _Way, key: Key, rows: Sequence[Row], flag: np.ndarray | None = None
) -> list[tuple[Resolver, Sequence[Row]]]:
    """Resolvers that split over every axis that one of their rows splits over, each with its rows.

    The smallest sizes together are hardly a mesh of these devices, but stand for all where they resolve alike.
    """
    smallest = [min((size for size in column if size > 1), default=1) for column in zip(*rows, strict=True)][1:]
    split = _key(way, smallest)
    if not isinstance(split, str) and all(key[axis] == ranks for axis, ranks in split.items()):
        one = _resolver(way, smallest)
        if flag is None or (_storable(one, np.asarray([smallest]).T)[:, 0] == flag).all():
            return [(one, rows)]
    found: list[tuple[Resolver, Sequence[Row]]] = []
    while rows:
        best = max(rows, key=lambda row: (sum(size > 1 for size in row[1:]), row))
        of = [row for row in rows if all(size == 1 or most > 1 for size, most in zip(row[1:], best[1:], strict=True))]
        found.append((_resolver(way, best[1:]), of))
        rows = [row for row in rows if row not in of]
    return found


def _resolver(way: _Way, sizes: Sequence[int]) -> Resolver:
    mesh = MeshShape(tuple(zip(AXES, map(int, sizes), strict=True)))
    return resolve(way.program, layout_on(way.storing, way.sequence, mesh), mesh, way.pins)


def _storable(resolver: Resolver, sizes: np.ndarray) -> np.ndarray:
    """For each kind of leaf, reluctance and mesh, whether a dim split no more reluctantly divides what it must."""
    program, at = resolver.program, {axis: position for position, axis in enumerate(AXES)}
    classes = program.step.axes.classes
    stored = sizes[at["fsdp"]]
    rows = {}
    for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False):
        labels = classes[value]
        if not leaf.shape or (labels, leaf.shape) in rows:
            continue
        spec = resolver.used(labels, leaf.shape)
        ways = [stored * np.prod([sizes[at[axis]] for axis in axes], axis=0, initial=1) for axes in spec]
        by_dim = [size % way == 0 for size, way in zip(leaf.shape, ways, strict=True)]
        order = [resolver.reluctance(label) for label in labels]
        rows[labels, leaf.shape] = [
            np.any([fits for fits, one in zip(by_dim, order, strict=True) if one <= limit], axis=0)
            for limit in sorted(set(order))
        ]
    return np.asarray([row for several in rows.values() for row in several], bool).reshape(-1, sizes.shape[1])
