"""Assigns classes of dims to mesh axes in one program; records why the others stay replicated."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spanax.errors import IdleAxisError, SpanaxError, nearest
from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import LAST_RESORT_AXES, PIPE, Layout
from spanax.plan.pipeline.layer_partition import Parts
from spanax.trace.program import Program

Pins = Mapping[str, str | Sequence[str] | None]


SMALL = 16
"""A value of the batch is gathered rather than refused below this part of the numbers of the largest."""

SENT_TO = -1
"""The rank of experts that tokens are sent to: what only says which are chosen is split along the batch instead."""


@dataclass(frozen=True)
class Uneven:
    """A dim of a named axis is not sharded because its size does not divide."""

    name: str
    size: int
    ways: int

    def __str__(self) -> str:
        return f"{self.name} ({self.size}) does not divide {self.ways} ways"


@dataclass(frozen=True)
class Taken:
    """A dim is not sharded because the mesh axis shards another dim of the same parameter."""

    axis: str
    path: str

    def __str__(self) -> str:
        return f"'{self.axis}' already splits another dim of {self.path}"


@dataclass(frozen=True)
class Scored:
    """A named axis is not sharded because only a router's scores have it: no weight and no work would be divided."""

    name: str

    def __str__(self) -> str:
        return f"only a router's scores have {self.name}"


Reason = Uneven | Taken | Scored


@dataclass(frozen=True, eq=False)
class Assignment:
    """For each mesh axis, the classes it splits and their rank (lowest first where a value has several).

    `reasons` says of a class that was offered to a mesh axis why that does not split it, `parts` of a class of layers
    how a pipeline's stages divide it.
    """

    ranks: Mapping[str, Mapping[int, int]]
    reasons: Mapping[int, Reason]
    parts: Mapping[int, Parts] = field(default_factory=dict)

    def kept(self, label: int | None, size: int) -> int:
        """How long a dim of a class is where it is kept: layers that stages do not divide are padded."""
        found = None if label is None else self.parts.get(label)
        return size if found is None or size != found.num_layers else found.num_kept


def pinned(layout: Layout, pins: Pins, program: Program, mesh: MeshShape) -> Layout:
    """The layout with the user's wishes for single axes: `{"vocab": "model"}`, or None to keep one whole.

    Raises:
      SpanaxError: no such axis in the program, or no such mesh axis.
    """
    if not pins:
        return layout
    check_pinned(program, pins)
    computed = dict(layout.computed)
    for name, wanted in pins.items():
        computed = {axis: tuple(n for n in names if n != name) for axis, names in computed.items()}
        for axis in (wanted,) if isinstance(wanted, str) else wanted or ():
            if axis not in mesh.names:
                raise SpanaxError(
                    f"cannot pin '{name}' to mesh axis '{axis}'.", where=f"mesh {mesh}", fix=nearest(axis, mesh.names)
                )
            computed[axis] = (name, *computed.get(axis, ()))
    return replace(layout, computed=tuple(computed.items()))


def check_pinned(program: Program, names: Iterable[str]) -> None:
    """Hold the names of pinned axes against the program.

    Raises:
      SpanaxError: it has none of that name.
    """
    known = sorted({*program.step.axes.names.values()})
    for name in names:
        if name not in known:
            raise SpanaxError(f"cannot pin axis '{name}': the program has none of that name.", fix=nearest(name, known))


def assign(program: Program, layout: Layout, mesh: MeshShape, pins: Pins, num_chunks: int = 1) -> Assignment:
    """Decide which classes each mesh axis splits; of stages each has so many chunks of the layers.

    Raises:
      IdleAxisError: a mesh axis would shard no weight and save no work.
      SpanaxError: the batch or a pinned axis does not divide.
    """
    _check_mapped(program, mesh)
    axes = program.step.axes
    ranks: dict[str, dict[int, int]] = {}
    taken: dict[int, int] = {}
    reasons: dict[int, Reason] = {}
    parts: dict[int, Parts] = {}
    # Of two classes of a name the earlier is split: its gradient ends where the model begins, one reduction less.
    labels = program.step.labels_by_name
    for axis, names in layout.computed:
        size = mesh.ways([axis])
        if size == 1:
            continue
        accepted: dict[int, int] = {}
        square: dict[int, int] = {}
        for rank, name in enumerate(names):
            is_last_resort = bool(accepted) and name in LAST_RESORT_AXES and not pins.get(name)
            for label in divided_layers(program) if name == "layers" else labels.get(name, ()):
                if is_last_resort and label not in program.heavy:
                    continue
                author = axes.names.get(label, name)
                if label in accepted or (author != name and author in pins):
                    continue  # a class with a name of its author's is pinned by that, and not by its use
                ways = taken.get(label, 1) * size
                in_parts = axis == PIPE and name == "layers" and ways == size <= axes.ways[label]
                if in_parts:
                    parts[label] = Parts(axes.ways[label], size, num_chunks)
                if axes.ways[label] % ways and not in_parts and _is_uneven(program, name, label, ways):
                    reasons[label] = Uneven(name, axes.ways[label], ways)
                    if name == "batch" or pins.get(name):
                        raise _does_not_divide(program, name, axes.ways[label], ways, layout, mesh)
                elif axis in layout.exclusive and (path := _clash(program, label, accepted)):
                    reasons.setdefault(label, Taken(axis, path))
                    square.setdefault(label, rank)
                else:
                    accepted[label] = rank
                    taken[label] = ways
        if not accepted and square:
            # Weights from an axis to itself (a residual stream): each is sharded along the dim that it sums over.
            label = next(iter(square))
            accepted, taken[label] = {label: square[label]}, taken.get(label, 1) * size
            del reasons[label]
        working = [rank for label, rank in accepted.items() if label in program.step.worked]
        if 0 not in working and not (working and axis in layout.exclusive):
            scored = {label: Scored(names[rank]) for label, rank in accepted.items() if rank == 0}
            raise _idle(program, axis, size, names, reasons | scored, layout, mesh)
        ranks[axis] = accepted
    if layout.sequence_axis and mesh.ways([layout.sequence_axis]) > 1:
        size = mesh.ways([layout.sequence_axis])
        ranks[layout.sequence_axis] |= {
            label: 1000 for label in labels.get("seq", ()) if axes.ways[label] % (taken.get(label, 1) * size) == 0
        }
    return Assignment(_with_experts(program, ranks, mesh), reasons, parts)


def _is_uneven(program: Program, name: str, label: int, ways: int) -> bool:
    """Whether a class has dims that matter and do not divide: small values of the batch are gathered instead.

    Rewards of a batch of 16 in 4 groups of 4 do not rule out 8 devices.
    """
    step = program.step
    if name != "batch":
        return True
    sized = [
        (math.prod(step.graph.shape(value)), step.graph.shape(value)[labels.index(label)])
        for value, labels in enumerate(step.axes.classes)
        if label in labels
    ]
    inputs = [leaf.shape[leaf.axes.index(name)] for leaf in program.batch if name in leaf.axes]
    largest = max(size for size, _ in sized)
    return any(size % ways for size in inputs) or any(
        length % ways and size * SMALL > largest for size, length in sized
    )


def _check_mapped(program: Program, mesh: MeshShape) -> None:
    """Raises where a `jax.shard_map` of the user runs over another number of devices."""
    for axes in program.step.mapped_meshes:
        size = math.prod(size for _, size in axes)
        if size != mesh.size:
            mapped = ",".join(f"{name}={size}" for name, size in axes)
            raise SpanaxError(
                f"the step has a jax.shard_map over {mapped}: {size} devices, and the mesh {mesh} has {mesh.size}.",
                fix=f"a cluster of {size} devices, or a jax.shard_map over a mesh of {mesh.size}",
            )


def _with_experts(program: Program, ranks: Mapping[str, dict[int, int]], mesh: MeshShape) -> dict[str, dict[int, int]]:
    """The ranks, of experts `SENT_TO` where that moves less than gathering the batch for them."""
    step, found = program.step, dict(ranks)
    batch_axes = [axis for axis, accepted in ranks.items() if not step.batch_labels.isdisjoint(accepted)]
    for axis in batch_axes:
        others = mesh.ways([one for one in batch_axes if one != axis])
        sent = [
            label
            for label, routing in step.routings.items()
            if label in ranks[axis] and routing.is_sent(mesh.ways([axis]), others)
        ]
        found[axis] = ranks[axis] | dict.fromkeys(sent, SENT_TO)
    return found


def divided_layers(program: Program) -> list[int]:
    """The class of the layers that a pipeline divides, if there are any: of several, those with the most parameters."""
    labels = program.step.labels_by_name.get("layers", ())
    return [max(labels, key=lambda label: program.size_by_class.get(label, 0))] if labels else []


def _clash(program: Program, label: int, accepted: Mapping[int, int]) -> str:
    """The path of a parameter that has this class twice, or beside one already accepted."""
    for path, labels in program.params_by_class.get(label, ()):
        if labels.count(label) > 1 or any(other in accepted for other in labels if other != label):
            return path
    return ""


def _does_not_divide(program: Program, name: str, size: int, ways: int, layout: Layout, mesh: MeshShape) -> SpanaxError:
    lower, upper = size // ways * ways, -(-size // ways) * ways
    near = f"{lower} or {upper}" if lower else f"{upper}"
    row = next((row for row in program.axes if row.name == name and row.leaves), None)
    # A loop of the step's own over parts of the batch splits the examples of a part.
    parts = f" in one of its parts, of {max(row.sizes)} in all," if row and size not in row.sizes else ""
    return SpanaxError(
        f"'{name}' of size {size}{parts} does not divide {ways} ways: {size} % {ways} = {size % ways}.",
        where=f"{row.leaves[0] if row else ''}, layout '{layout.name}', mesh {mesh}",
        fix=f"a {name} of {near}{' a part' if parts else ''}, or a smaller mesh axis",
    )


def _idle(
    program: Program,
    axis: str,
    size: int,
    names: Sequence[str],
    reasons: Mapping[int, Reason],
    layout: Layout,
    mesh: MeshShape,
) -> IdleAxisError:
    known = sorted({name for leaf in (*program.leaves, *program.batch) for name in leaf.axes if name})
    needed = names if axis in layout.exclusive else names[:1]
    labels = [label for name in names for label in program.step.labels_by_name.get(name, ())]
    tried = dict.fromkeys(str(reasons[label]) for label in labels if label in reasons)
    return IdleAxisError(
        f"mesh axis '{axis}' ({size}) has nothing to split in this program under layout '{layout.name}'.",
        where="; ".join(tried) or f"it splits {', '.join(names)}; the program has {', '.join(known)}",
        fix=f"{axis}={_largest_below(program, needed, size)}, or a layout without '{axis}'",
    )


def _largest_below(program: Program, names: Sequence[str], size: int) -> int:
    step = program.step
    labels = step.worked.intersection(label for name in names for label in step.labels_by_name.get(name, ()))
    ways = [step.axes.ways[label] for label in labels]
    return max((k for k in range(1, size) for way in ways if way % k == 0), default=1)
