"""Resolves a layout into the sharding of every value of a program, with the reason.

Placements in the plan, sharding constraints in the step and costs all come from this resolver.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

from spanax.errors import ModelMeshError
from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import PIPE, Layout
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.assign import SENT_TO, SEQUENCES, Assignment, Pins, assign, pinned
from spanax.trace.analysis.labels import Key, Labels, label_key
from spanax.trace.analysis.sharding_keys import ShardingKey, in_colors
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.provenance import Origin
from spanax.trace.program import Program
from spanax.trace.variables import Leaf

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes that shard each dim, outermost first; `()` for a replicated dim."""


def axes_of(spec: Sequence[Sequence[str]]) -> set[str]:
    """Returns the mesh axes that shard any dim."""
    return {axis for by in spec for axis in by}


@dataclass(frozen=True)
class Constraint:
    """The sharding of one value during the step.

    `is_open` leaves dims without an axis to the compiler. `used` is the computed sharding of a value that has its
    stored sharding; None where both are equal.
    """

    spec: Spec
    is_open: bool = False
    used: Spec | None = None

    @property
    def computed(self) -> Spec:
        """The sharding of the value where it is computed with activations."""
        return self.spec if self.used is None else self.used


@dataclass(frozen=True, eq=False)
class Resolver:
    """A layout applied to one program on one mesh.

    `layout` has the pins. `anchors` are the specs of leaves that are sharded already, by path: leaves and values that
    the program joins with them are sharded alike.
    """

    program: Program
    layout: Layout
    mesh: MeshShape
    pins: Pins
    num_chunks: int
    assignment: Assignment
    anchors: Mapping[str, Spec] = field(default_factory=dict)

    def of(self, program: Program) -> "Resolver":
        """Returns the resolver of the same layout for another trace of the program, whose classes are assigned anew."""
        if program is self.program:
            return self
        assignment = assign(program, self.layout, self.mesh, self.pins, self.num_chunks)
        assignment = with_anchors(assignment, program, self.layout, self.anchors)
        return replace(self, program=program, assignment=assignment)

    def computed(
        self, labels: Labels, shape: Sequence[int], replicated: frozenset[int] = frozenset(), *, is_routed: bool
    ) -> Spec:
        """Returns the spec of a value in computation: each mesh axis shards the first dim of its list that divides.

        Of several axes that shard sequences where they shard no other dim, the last is outermost: a value that has
        another dim for the others is then gathered over them without permuting its shards.
        """
        key = labels, tuple(shape), replicated, is_routed
        if key not in self._computed:
            self._computed[key] = self._new_computed(*key)
        return self._computed[key]

    @cached_property
    def _computed(self) -> dict[tuple[object, ...], Spec]:
        return {}

    def _new_computed(
        self, labels: Labels, shape: tuple[int, ...], replicated: frozenset[int], is_routed: bool
    ) -> Spec:
        spec: list[tuple[str, ...]] = [()] * len(shape)
        for axis, ranks in self.assignment.ranks.items():
            candidates = [
                (ranks[label], dim, label) for dim, label in enumerate(labels) if label is not None and label in ranks
            ]
            # A weight of two hidden classes is sharded along the same one however it is transposed.
            candidates.sort(key=lambda each: (each[0], each[2] if each[0] < SENT_TO else each[1]))
            for rank, dim, label in (each for each in candidates if not is_routed or each[0] != SENT_TO):
                size = self.assignment.padded_size(label, shape[dim])
                by = spec[dim]
                if dim not in replicated and size % self.mesh.ways((*by, axis)) == 0:
                    outer = [other for other in by if self.assignment.ranks[other][label] != SEQUENCES]
                    spec[dim] = (*outer, axis, *by[len(outer) :]) if rank == SEQUENCES else (*by, axis)
                    break
        return tuple(spec)

    @cached_property
    def colors(self) -> dict[int, object]:
        """What the layout decides by, for each class: it shards classes of one color alike."""
        step = self.program.step
        axes = step.axes
        ranks = self.assignment.ranks.values()
        alone = {*step.routings, *step.looked_up, *step.layer_labels, *(axes.ways if self.anchors else ())}
        return {
            label: label
            if label in alone
            else (axes.names.get(label), axes.uses.get(label), ways, *(by.get(label) for by in ranks))
            for label, ways in axes.ways.items()
        }

    def used(self, labels: Labels, shape: Sequence[int]) -> Spec:
        """Returns the spec of an array of the state or the batch in computation."""
        return self.computed(labels, shape, is_routed=labels in self.program.step.routed)

    def stored(self, used: Spec, labels: Labels, shape: Sequence[int], kind: str) -> Spec:
        """Returns the spec of an array in storage.

        In addition to its computed spec, `used`, it is sharded over the layout's stored axes, preferably on the largest
        replicated dim: a reduction over one mesh axis that shards a dim together with another cannot be a single
        reduce-scatter. The choice follows the classes, not the positions, so that a transposed gradient is sharded
        equally.
        """
        before, axes = self._exchanged(*self._before_storage(used, labels, shape, kind), labels, shape)
        return self._further(before, axes, labels, shape, range(len(shape)))

    def _exchanged(
        self, used: Spec, axes: tuple[str, ...], labels: Labels, shape: Sequence[int]
    ) -> tuple[Spec, tuple[str, ...]]:
        """Returns the spec of an array before its storage is sharded further, and the mesh axes that shard it then.

        A shard of a concatenation has none of the shards of its pieces. Axes that shard pieces in computation shard
        another dim in storage, from which one all-to-all exchanges the array; they replicate vectors. Stages of a
        pipeline compute with whole dims.
        """
        step = self.program.step
        wholes = step.axes.wholes
        dims = [by for by, label in zip(used, labels, strict=True) if label in wholes]
        moved = tuple(axis for by in dims for axis in by if axis in self.layout.exclusive)
        if not moved or self.mesh.ways([PIPE]) > 1:
            return used, axes
        rest = tuple(tuple(axis for axis in by if axis not in moved) for by in used)
        others = [
            dim
            for dim, label in enumerate(labels)
            if label is not None and label not in wholes and label not in step.layer_labels
        ]
        together = self._further(rest, (*axes, *moved), labels, shape, others)
        alone = self._further(rest, moved, labels, shape, others)
        if together != rest:
            return together, ()
        is_small = math.prod(shape[dim] for dim in others) < self.mesh.ways(moved)
        return (alone, axes) if alone != rest or is_small else (used, axes)

    def _further(
        self, used: Spec, axes: tuple[str, ...], labels: Labels, shape: Sequence[int], dims: Collection[int]
    ) -> Spec:
        """Returns a spec in which axes shard one more of some dims, preferably the largest replicated one."""
        if not axes:
            return used
        ways = self.mesh.ways(axes)
        padded = self.padded_shape(labels, shape)
        local = [size // self.mesh.ways(by) for size, by in zip(padded, used, strict=True)]
        order = [
            (
                self.reluctance(labels[dim]),
                bool(used[dim]),
                -local[dim],
                -1 if labels[dim] is None else labels[dim],
                dim,
            )
            for dim in dims
            if local[dim] % ways == 0
        ]
        dim = min(order)[-1] if order else None
        return tuple((*by, *axes) if index == dim else by for index, by in enumerate(used))

    def padded_shape(self, labels: Labels, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the stored shape of an array of the state, padding included."""
        return tuple(self.assignment.padded_size(label, size) for label, size in zip(labels, shape, strict=True))

    def _stored_axes(self, used: Spec, kind: str) -> tuple[str, ...]:
        """Returns the mesh axes that shard an array in storage, in addition to those of its computed spec."""
        taken = axes_of(used)
        return tuple(a for a in self.layout.stored(kind) if self.mesh.ways([a]) > 1 and a not in taken)

    def _before_storage(
        self, used: Spec, labels: Labels, shape: Sequence[int], kind: str
    ) -> tuple[Spec, tuple[str, ...]]:
        """Returns the spec of an array before its storage is sharded further, and the mesh axes that shard it then.

        An array that the program joins with anchors starts from the spec of one of its kind, or else of a parameter,
        and only the axes over which parameters are not stored shard it further.
        """
        for other in (kind, "param"):
            anchor = self._anchored.get((other, label_key(labels)))
            spec = () if anchor is None else _permuted(*anchor, labels)
            if spec and all(size % self.mesh.ways(by) == 0 for size, by in zip(shape, spec, strict=True)):
                axes = () if other == kind else self._stored_axes(spec, kind)
                return spec, tuple(axis for axis in axes if axis not in self.layout.stored(other))
        return used, self._stored_axes(used, kind)

    @cached_property
    def _anchored(self) -> dict[tuple[str, Key], tuple[Labels, Spec]]:
        """The labels and the spec of the first anchor of each kind with some classes."""
        result: dict[tuple[str, Key], tuple[Labels, Spec]] = {}
        for leaf, labels in _labeled(self.program):
            if leaf.path in self.anchors:
                result.setdefault((self.kind(leaf, labels), label_key(labels)), (labels, self.anchors[leaf.path]))
        return result

    def reluctance(self, label: int | None) -> tuple[bool, bool]:
        """Returns a sort key of classes for storage; scanned dims and looked-up dims are last."""
        step = self.program.step
        return label in step.layer_labels, label in step.looked_up

    def kind(self, leaf: Leaf, labels: Labels) -> str:
        """Returns the kind a leaf is stored as; other state shaped like a parameter (its average) is stored like it."""
        return "param" if leaf.kind == "other" and label_key(labels) in self.program.param_keys else leaf.kind

    def placed_by(self, leaf: Leaf, labels: Labels) -> tuple[object, ...]:
        """Returns what the spec of a leaf depends on: it is equal for the leaves of equal layers."""
        if labels not in self._patterns:
            marks = labels in self.program.step.routed, label_key(labels) in self.program.param_keys
            self._patterns[labels] = *in_colors(labels, self.colors), marks
        known = leaf.kind, leaf.shape, leaf.dtype, leaf.annotation, self.anchors.get(leaf.path)
        return known, self._patterns[labels]

    @cached_property
    def _patterns(self) -> dict[Labels, tuple[object, ...]]:
        return {}

    def placed(self, leaf: Leaf, labels: Labels) -> tuple[Spec, list[Reason]]:
        """Returns the spec of a leaf of the state or the batch between steps, and the reasons for it.

        Raises:
          SpanaxError: the spec that its author wrote does not divide it.
        """
        if leaf.path in self.anchors:
            return self.anchors[leaf.path], [Reason(Code.ANCHORED)]
        used = self.used(labels, leaf.shape)
        kind = self.kind(leaf, labels)
        written = annotated(leaf, self.mesh)
        if written is not None:
            return self._annotated(leaf, written, labels, used, kind)
        if kind == "batch":
            return used, []
        spec = self.stored(used, labels, leaf.shape, kind)
        axes = self._stored_axes(used, kind)
        if leaf.shape and axes and spec == used:
            sizes = "x".join(map(str, leaf.shape))
            num_shards = self.mesh.ways(axes)
            return spec, [Reason(Code.REPLICATED, sizes, "+".join(axes), num_shards=num_shards)]
        hidden = tuple(axis for axis in self.layout.stored(kind) if axis in axes_of(used))
        axes = axes or hidden or tuple(axis for axis in axes_of(spec) if axis in self.layout.exclusive)
        stored = [Reason(Code.STORED, axis="+".join(axes))] if axes and (hidden or spec != used) else []
        return spec, stored + self._reasons(labels, leaf.shape, spec)

    def _annotated(self, leaf: Leaf, written: Spec, labels: Labels, used: Spec, kind: str) -> tuple[Spec, list[Reason]]:
        """Returns the spec of an annotated leaf; the layout decides for names not of this mesh, and for storage."""
        taken = axes_of(written)
        is_open = [isinstance(entry, str) and entry not in self.mesh.names for entry in leaf.annotation or ()]
        merged = tuple(
            tuple(axis for axis in by if axis not in taken) if is_free else annotation
            for annotation, by, is_free in zip(written, used, is_open, strict=True)
        )
        spec = self.stored(merged, labels, leaf.shape, kind)
        reasons = [Reason(Code.ANNOTATED)]
        if dropped := [axis for axis in _mesh_axes(leaf, self.mesh) if axis not in taken]:
            reasons = [Reason(Code.ANNOTATED_SIZE_1, axis="+".join(dropped)), *reasons[: any(written)]]
        if spec != merged:
            reasons.append(Reason(Code.STORED, axis="+".join(self._stored_axes(merged, kind))))
        return spec, reasons

    def constraints(self, traced: StepAnalysis) -> "Constraints":
        """Returns the constraint of every value of a traced function, by index; None: left to the compiler."""
        return Constraints(self, traced)

    def constraint(self, key: ShardingKey) -> Constraint | None:
        """Returns the sharding of all values with one key during the step; None: left to the compiler.

        Where experts stay on their devices, each of these devices has the rows of all tokens.
        """
        result = self._constraint(key)
        staying = self.assignment.staying if key.rows else ()
        if result is None or not staying:
            return result
        spec = tuple(tuple(axis for axis in by if axis not in staying) for by in result.computed)
        return Constraint(spec, result.is_open)

    def _constraint(self, key: ShardingKey) -> Constraint | None:
        labels = key.labels
        shape = key.shape
        origin = key.origin
        if key.replicated:
            return Constraint(self.computed(labels, shape, key.replicated, is_routed=key.is_routed))
        if not any(label is not None for label in labels):
            return None
        is_weight = label_key(labels) in self.program.param_keys
        used = self.computed(labels, shape, is_routed=key.is_routed)
        if key.is_computed and (is_weight or origin & Origin.BATCH):
            return Constraint(used)
        if is_weight:
            kind = "gradient" if origin & Origin.BATCH else "param"
            if origin & Origin.OPTIMIZER:
                kind = "optimizer"
            spec = self.stored(used, labels, shape, kind)
            return Constraint(spec, used=None if used == spec else used)
        return Constraint(used, is_open=True) if any(used) else None

    def not_sharded(self, leaf: Leaf, labels: Labels) -> list[Reason]:
        """Returns why dims of a leaf that a mesh axis could shard are not sharded; empty for annotated leaves."""
        if annotated(leaf, self.mesh) is not None or leaf.kind == "batch" or leaf.path in self.anchors:
            return []
        used = self.used(labels, leaf.shape)
        kind = self.kind(leaf, labels)
        spec = self.stored(used, labels, leaf.shape, kind)
        if leaf.shape and spec == used and self._stored_axes(used, kind):
            return []
        return self._reasons(labels, leaf.shape, spec)

    def _reasons(self, labels: Labels, shape: Sequence[int], spec: Spec) -> list[Reason]:
        known = self.assignment.reasons
        reasons = dict[Reason, None]()
        for label, size, by in zip(labels, shape, spec, strict=True):
            if label is not None and (not by or label in self.program.step.axes.groups):
                if label in known:
                    reasons[known[label]] = None
                elif size % self.program.step.axes.ways[label]:
                    name = self.program.step.axes.names.get(label, "a dim")
                    reasons[Reason(Code.STORED_UNPADDED, name, size=size)] = None
        return list(reasons)


def annotated(leaf: Leaf, mesh: MeshShape) -> Spec | None:
    """Returns the spec that the author wrote if it names axes of this mesh; logical names are names of axes instead.

    A dim of size 1 is replicated, as JAX does for an annotation on an Auto mesh.

    Raises:
      SpanaxError: the spec does not divide the leaf.
    """
    if leaf.annotation is None or len(leaf.annotation) != len(leaf.shape) or not _mesh_axes(leaf, mesh):
        return None
    spec = tuple(
        tuple(axis for axis in _entries(entry) if axis in mesh.names) if size != 1 else ()
        for entry, size in zip(leaf.annotation, leaf.shape, strict=True)
    )
    for dim, (size, by) in enumerate(zip(leaf.shape, spec, strict=True)):
        if size % mesh.ways(by):
            raise ModelMeshError(
                f"`{leaf.path}` is annotated to be sharded over {'+'.join(by)} along dim {dim}, "
                f"and {size} % {mesh.ways(by)} = {size % mesh.ways(by)}.",
                where=f"{leaf.path} {leaf.shape} {leaf.annotation}, mesh {mesh}",
                fix="a mesh axis that divides it, or another annotation",
            )
    return spec


def _mesh_axes(leaf: Leaf, mesh: MeshShape) -> list[str]:
    return [axis for entry in leaf.annotation or () for axis in _entries(entry) if axis in mesh.names]


def _entries(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


class Constraints(Sequence[Constraint | None]):
    """The constraints of a traced function's values, computed on access, once for all values with equal keys."""

    def __init__(self, resolver: Resolver, traced: StepAnalysis):
        self._resolver = resolver
        self._traced = traced
        self._known: dict[int, Constraint | None] = {}

    def __len__(self) -> int:
        return len(self._traced.axes.classes)

    @overload
    def __getitem__(self, value: int) -> Constraint | None: ...
    @overload
    def __getitem__(self, value: slice) -> Sequence[Constraint | None]: ...
    def __getitem__(self, value: int | slice) -> Constraint | None | Sequence[Constraint | None]:
        if isinstance(value, slice):
            return [self[index] for index in range(*value.indices(len(self)))]
        if value >= len(self):
            raise IndexError(value)
        key = self._traced.sharding_keys[value]
        if key.number not in self._known:
            self._known[key.number] = self._resolver.constraint(key)
        return self._known[key.number]


def resolve(
    program: Program,
    layout: Layout,
    mesh: MeshShape,
    pins: Pins,
    num_chunks: int = 1,
    anchors: Mapping[str, Spec] = MappingProxyType({}),
) -> Resolver:
    """Returns the resolver of one program, layout and mesh; each pipeline stage has `num_chunks` chunks of the layers.

    Raises:
      SpanaxError: the layout does not apply to this program on this mesh.
    """
    layout = pinned(layout, pins, program, mesh)
    assignment = with_anchors(assign(program, layout, mesh, pins, num_chunks), program, layout, anchors)
    return Resolver(program, layout, mesh, pins, num_chunks, assignment, anchors)


def with_anchors(assignment: Assignment, program: Program, layout: Layout, anchors: Mapping[str, Spec]) -> Assignment:
    """Returns an assignment whose mesh axes shard the classes that they shard in the anchors, where they are computed.

    The names of classes may differ between programs: one without matmuls does not tell `embed` from `mlp`.
    """
    sharded = defaultdict[str, set[int]](set)
    beside = defaultdict[str, set[int]](set)
    stored = {axis for kind in ("param", "gradient", "optimizer") for axis in layout.stored(kind)}
    for leaf, labels in _labeled(program):
        spec = anchors.get(leaf.path, ())
        for axis in axes_of(spec) - stored:
            for label, by in zip(labels, spec, strict=True):
                if label is not None:
                    (sharded if axis in by else beside)[axis].add(label)
    ranks = dict(assignment.ranks)
    for axis, classes in sharded.items():
        known = ranks.get(axis, {})
        others = {label: rank for label, rank in known.items() if label not in beside[axis]}
        ranks[axis] = others | {label: known.get(label, 0) for label in classes}
    return replace(assignment, ranks=ranks) if sharded else assignment


def _labeled(program: Program) -> Iterable[tuple[Leaf, Labels]]:
    """Returns the leaves of the state with the classes of their dims."""
    classes = program.step.axes.classes
    return ((leaf, classes[value]) for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False))


def _permuted(labels: Labels, spec: Spec, others: Labels) -> Spec:
    """Returns a spec of dims with some classes for dims with the same classes in another order."""
    if labels == others:
        return spec
    by_label = dict(zip(labels, spec, strict=True))
    return tuple(() if label is None else by_label[label] for label in others)
