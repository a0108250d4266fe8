"""Enumerates every layout of a program on a cluster, as arrays; counts invalid layouts by reason."""

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
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.assign import Pins, pinned_to
from spanax.plan.sharding.attention import attention_kernels
from spanax.plan.sharding.resolve import Resolver, annotated, resolve
from spanax.trace.program import Program

AXES = ("data", "fsdp", "expert", "context", "model")
"""The mesh axes inside a stage, slowest first: the last axis uses the fastest links."""

STORING = {"fsdp": ("param", "gradient", "optimizer")} | STORED
"""The arrays that a layout with an `fsdp` axis shards over it in storage, by name."""

Rejections = Counter[Reason]
"""The number of rejected layouts by reason."""

Key = dict[str, frozenset[tuple[int, int]]]
Row = tuple[int, ...]
Groups = list[tuple[Key, list[Row]]]


@dataclass(frozen=True, eq=False)
class Family:
    """Meshes with the same resolved layout: one pass over the program prices all of them.

    The resolved layout is the same where computation shards the same dims, and storage shards each leaf over the same
    axes, along any dim. The `resolver` shards over every axis that any of the meshes shards over; its mesh need not be
    one of them. `sizes` has shape [AXES, meshes]; `num_stages` has shape [meshes].
    """

    storing: str
    sequence: bool
    resolver: Resolver
    sizes: np.ndarray
    num_stages: np.ndarray


def families(
    program: Program, cluster: Cluster, batch_size: int, rejected: Rejections, pins: Pins | None = None,
    model: int | None = None,
) -> list[Family]:  # fmt: skip
    """Returns every mesh of a cluster under every storage and sequence option, grouped by resolved layout.

    Args:
      program: the program to train.
      cluster: the devices; every mesh uses all of them.
      batch_size: examples per step; every mesh must divide it.
      rejected: counts rejected layouts by reason.
      pins: the mesh axes requested for single axes, in every layout.
      model: the size of `model` in every mesh; by default, any.
    """
    meshes = [row for row in _meshes(program, cluster.num_devices, pins or {}) if model in (None, row[-1])]
    keys: dict[tuple[object, ...], Key | Reason] = {}
    result = []
    optimizer = any(leaf.kind == "optimizer" and leaf.shape for leaf in program.leaves)
    for storing in STORING:
        for sequence in (False, True):
            options, groups = _Options(program, storing, sequence, pins or {}), Groups()
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
                    _join(groups, key, (stages, *sizes))
            result += [family for key, rows in groups for family in _stored_alike(options, key, rows, rejected)]
    return result


def layout_on(storing: str, sequence: bool, mesh: MeshShape) -> Layout:
    """Returns the layout of a family on one mesh, with the name of its preset."""
    layout = layout_of(mesh, STORING[storing])
    # `hsdp` shards all arrays in storage; with fewer, the name lists the parts.
    name = layout.name.replace("hsdp", "data+fsdp").replace("fsdp", storing) if storing != "fsdp" else layout.name
    if sequence:
        return replace(layout, name=name + "+seq", sequence_axis="model")
    return replace(layout, name=name)


def mesh_of(sizes: Sequence[int]) -> MeshShape:
    """Returns a mesh of AXES without axes of one device, or `data=1`."""
    axes = tuple((axis, int(size)) for axis, size in zip(AXES, sizes, strict=True) if size > 1)
    return MeshShape(axes or (("data", 1),))


def is_standard(mesh: MeshShape) -> bool:
    """Whether a mesh has only AXES, in order: a search prices only such meshes."""
    positions = [AXES.index(axis) if axis in AXES else -1 for axis, size in mesh.axes if size > 1]
    return positions == sorted(positions) and -1 not in positions


def _meshes(program: Program, num_devices: int, pins: Pins) -> Iterator[tuple[int, ...]]:
    """Yields (stages, *sizes of AXES) with a product of `num_devices`, for axes that can shard the program."""
    names = {axis.name: axis.ways for axis in program.axes}
    uses = {*names, *program.step.axes.uses.values()}
    num_layers = program.step.layer_carry[1]
    is_pinned = any("model" in pinned_to(pin) for pin in pins.values())
    limits = {
        "expert": names.get("experts", 1),
        "context": math.gcd(*(axis.ways for axis in program.axes if axis.name == "seq")) if "seq" in names else 1,
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
                            yield stages, data, fsdp, expert, context, model


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
    return {axis: frozenset(ranks.items()) for axis, ranks in assignment.ranks.items()}


def _join(groups: Groups, key: Key, row: Row) -> None:
    """Adds a row to the first compatible group; an axis of one device shards nothing and is compatible with any."""
    for known, rows in groups:
        if all(known.get(axis, ranks) == ranks for axis, ranks in key.items()):
            known.update(key)
            rows.append(row)
            return
    groups.append((dict(key), [row]))


def _stored_alike(options: _Options, key: Key, rows: Sequence[Row], rejected: Rejections) -> list[Family]:
    """Returns the families of one group, separated by the leaves that storage can shard on each mesh."""
    result = []
    for resolver, members in _represented(options, key, rows):
        flags, num_stored = _divisible(resolver, np.asarray(members, int).T[1:])
        for flag in np.unique(flags, axis=1).T:
            same_rows = [row for row, column in zip(members, flags.T, strict=True) if (column == flag).all()]
            if not flag[:num_stored].any():
                idle = [row for row in same_rows if row[1 + AXES.index("fsdp")] > 1]
                rejected[Reason(Code.NOTHING_STORED)] += len(idle)
                same_rows = [row for row in same_rows if row not in idle]
            if not same_rows:
                continue
            for representative, represented in _represented(options, key, same_rows, flag):
                table = np.asarray(represented, int).T
                result.append(Family(options.storing, options.sequence, representative, table[1:], table[0]))
    return result


def _represented(
    options: _Options, key: Key, rows: Sequence[Row], flag: np.ndarray | None = None
) -> list[tuple[Resolver, Sequence[Row]]]:
    """Returns resolvers that shard over every axis that any of their rows shards over, each with its rows.

    The smallest sizes of all rows rarely form a mesh of these devices, but represent all rows where the resolved layout
    is the same.
    """
    smallest = [min((size for size in column if size > 1), default=1) for column in zip(*rows, strict=True)][1:]
    smallest_key = _key(options, smallest)
    if not isinstance(smallest_key, Reason) and all(key[axis] == ranks for axis, ranks in smallest_key.items()):
        resolver = _resolver(options, smallest)
        if flag is None or (_divisible(resolver, np.asarray([smallest]).T)[0][:, 0] == flag).all():
            return [(resolver, rows)]
    result: list[tuple[Resolver, Sequence[Row]]] = []
    while rows:
        best = max(rows, key=lambda row: (sum(size > 1 for size in row[1:]), row))
        covered = [
            row for row in rows if all(size == 1 or most > 1 for size, most in zip(row[1:], best[1:], strict=True))
        ]
        result.append((_resolver(options, best[1:]), covered))
        rows = [row for row in rows if row not in covered]
    return result


def _resolver(options: _Options, sizes: Sequence[int]) -> Resolver:
    mesh = MeshShape(tuple(zip(AXES, map(int, sizes), strict=True)))
    return resolve(options.program, layout_on(options.storing, options.sequence, mesh), mesh, options.pins)


def _divisible(resolver: Resolver, sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns for each mesh what its sizes divide, as the resolved layout needs, and the number of rows of storage.

    The first rows are those of `_storable`, the others those of `_exchangeable`.
    """
    stored = _storable(resolver, sizes)
    return np.concatenate([stored, _exchangeable(resolver, sizes)]), len(stored)


def _exchangeable(resolver: Resolver, sizes: np.ndarray) -> np.ndarray:
    """Returns for each batch dim of each attention kernel and mesh whether the axes of the sequence also divide it."""
    step, mesh_sizes = resolver.program.step, dict(zip(AXES, sizes, strict=True))
    rows = {}
    for op in attention_kernels(step):
        form, queries = op.params["form"], op.inputs[0]
        spec = resolver.used(step.axes.classes[queries], step.graph.shape(queries))
        for dim, size in enumerate(form.sizes[: form.num_batch]):
            num_shards = [mesh_sizes[axis] for axis in (*spec[dim], *spec[form.queries])]
            rows[form, dim] = size % np.prod(num_shards, axis=0, initial=1) == np.zeros(sizes.shape[1])
    return np.asarray([*rows.values()], bool).reshape(-1, sizes.shape[1])


def _storable(resolver: Resolver, sizes: np.ndarray) -> np.ndarray:
    """Returns for each (labels, shape), reluctance and mesh whether a dim of at most this reluctance is divisible."""
    program, index = resolver.program, {axis: position for position, axis in enumerate(AXES)}
    classes = program.step.axes.classes
    stored = sizes[index["fsdp"]]
    rows = {}
    for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False):
        labels = classes[value]
        if not leaf.shape or (labels, leaf.shape) in rows:
            continue
        spec = resolver.used(labels, leaf.shape)
        num_shards = [stored * np.prod([sizes[index[axis]] for axis in axes], axis=0, initial=1) for axes in spec]
        by_dim = [size % count == 0 for size, count in zip(leaf.shape, num_shards, strict=True)]
        order = [resolver.reluctance(label) for label in labels]
        rows[labels, leaf.shape] = [
            np.any([fits for fits, rank in zip(by_dim, order, strict=True) if rank <= limit], axis=0)
            for limit in sorted(set(order))
        ]
    return np.asarray([row for flags in rows.values() for row in flags], bool).reshape(-1, sizes.shape[1])
