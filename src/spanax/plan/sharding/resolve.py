"""Resolves a layout into the sharding of every value of a program, with the reason.

Placements in the plan, sharding constraints in the step and costs all come from this resolver.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from spanax.errors import SpanaxError
from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import Layout
from spanax.plan.sharding.assign import SENT_TO, Assignment, Pins, Reason, assign, pinned
from spanax.trace.analysis.op_groups import label_key
from spanax.trace.analysis.sharding_keys import ShardingKey
from spanax.trace.jaxpr.provenance import Origin
from spanax.trace.program import Program
from spanax.trace.traced import Traced
from spanax.trace.variables import Leaf

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes that split each dim, outermost first; `()` for a dim left whole."""

Labels = tuple[int | None, ...]


@dataclass(frozen=True)
class Constraint:
    """How one value is split while the step runs.

    `is_open` leaves the dims without an axis to the compiler. `used` is how a value that lies in its stored
    layout is split where activations meet it; None where that is no other.
    """

    spec: Spec
    is_open: bool = False
    used: Spec | None = None

    @property
    def computed(self) -> Spec:
        """How the value is split where activations meet it."""
        return self.spec if self.used is None else self.used


@dataclass(frozen=True, eq=False)
class Resolver:
    """A layout laid over one program on one mesh."""

    program: Program
    layout: Layout
    mesh: MeshShape
    assignment: Assignment

    def of(self, program: Program) -> "Resolver":
        """The same layout over the same program traced otherwise: with other classes, found anew."""
        if program is self.program:
            return self
        return replace(self, program=program, assignment=assign(program, self.layout, self.mesh, {}))

    def computed(
        self, labels: Labels, shape: Sequence[int], whole: frozenset[int] = frozenset(), *, is_routed: bool
    ) -> Spec:
        """The spec of a value while it is computed with: each mesh axis on the first dim of its list."""
        split: list[tuple[str, ...]] = [()] * len(shape)
        for axis, ranks in self.assignment.ranks.items():
            known = [(ranks[at], dim) for dim, at in enumerate(labels) if at is not None and at in ranks]
            for _, dim in sorted(one for one in known if not is_routed or one[0] != SENT_TO):
                size = self.assignment.kept(labels[dim], shape[dim])
                if dim not in whole and size % self.mesh.ways((*split[dim], axis)) == 0:
                    split[dim] = (*split[dim], axis)
                    break
        return tuple(split)

    def used(self, labels: Labels, shape: Sequence[int]) -> Spec:
        """The spec of an array of the state or the batch where it is computed with."""
        return self.computed(labels, shape, is_routed=labels in self.program.step.routed)

    def stored(self, used: Spec, labels: Labels, shape: Sequence[int], kind: str) -> Spec:
        """The spec of an array where it is kept.

        Beyond its computed spec, `used`, it is split over the layout's stored axes, on the largest dim that is whole
        till then: a sum over one mesh axis that splits a dim together with another cannot be scattered at once. The
        choice follows the classes, not the positions: a gradient that comes transposed is split alike.
        """
        axes = self._stored_axes(used, kind)
        if not axes:
            return used
        ways, kept = self.mesh.ways(axes), self.kept(labels, shape)
        local = [size // self.mesh.ways(by) for size, by in zip(kept, used, strict=True)]
        order = [
            (self.reluctance(label), bool(used[dim]), -local[dim], label if label is not None else -1, dim)
            for dim, label in enumerate(labels)
            if local[dim] % ways == 0
        ]
        dim = min(order)[-1] if order else None
        return tuple((*by, *axes) if at == dim else by for at, by in enumerate(used))

    def kept(self, labels: Labels, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of an array of the state as it is kept, padding included."""
        return tuple(self.assignment.kept(label, size) for label, size in zip(labels, shape, strict=True))

    def _stored_axes(self, used: Spec, kind: str) -> tuple[str, ...]:
        """The mesh axes over which an array is to be split where it is kept, beyond those that split it already."""
        taken = {axis for by in used for axis in by}
        return tuple(a for a in self.layout.stored(kind) if self.mesh.ways([a]) > 1 and a not in taken)

    def reluctance(self, label: int | None) -> tuple[bool, bool]:
        """What comes after other classes when an array is stored: what is scanned, and what is looked up."""
        step = self.program.step
        return label in step.layer_labels, label in step.looked_up

    def kind(self, leaf: Leaf, labels: Labels) -> str:
        """As which kind a leaf is stored: other state shaped like a parameter (an average of it) goes with it."""
        return "param" if leaf.kind == "other" and label_key(labels) in self.program.param_keys else leaf.kind

    def placed(self, leaf: Leaf, labels: Labels) -> tuple[Spec, str]:
        """The spec of a leaf of the state or the batch between steps, and the reason.

        Raises:
          SpanaxError: its author wrote a spec that does not divide it.
        """
        used, kind = self.used(labels, leaf.shape), self.kind(leaf, labels)
        written = annotated(leaf, self.mesh)
        if written is not None:
            return self._annotated(leaf, written, labels, used, kind)
        if kind == "batch":
            return used, ""
        spec, axes = self.stored(used, labels, leaf.shape, kind), self._stored_axes(used, kind)
        if leaf.shape and axes and spec == used:
            sizes, ways = "x".join(map(str, leaf.shape)), self.mesh.ways(axes)
            return spec, f"stored whole: no dim of {sizes} divides {'+'.join(axes)} ({ways} ways)"
        return spec, self._why(labels, spec, f"stored over {'+'.join(axes)}" if spec != used else "")

    def _annotated(self, leaf: Leaf, written: Spec, labels: Labels, used: Spec, kind: str) -> tuple[Spec, str]:
        """The spec of an annotated leaf: the layout decides for names that are not of this mesh, and what is stored."""
        taken = {axis for by in written for axis in by}
        is_open = [isinstance(entry, str) and entry not in self.mesh.names for entry in leaf.annotation or ()]
        merged = tuple(
            tuple(axis for axis in by if axis not in taken) if free else mine
            for mine, by, free in zip(written, used, is_open, strict=True)
        )
        spec, parts = self.stored(merged, labels, leaf.shape, kind), ["as the model's author annotated it"]
        if dropped := [axis for axis in _mesh_axes(leaf, self.mesh) if axis not in taken]:
            parts = [f"annotated over {'+'.join(dropped)}, which does not divide 1", *parts[: any(written)]]
        if spec != merged:
            parts.append(f"stored over {'+'.join(self._stored_axes(merged, kind))}")
        return spec, "; ".join(parts)

    def constraints(self, traced: Traced) -> "Constraints":
        """The constraint of every value of a traced function, by its number; None: left to the compiler."""
        return Constraints(self, traced)

    def constraint(self, role: ShardingKey) -> Constraint | None:
        """How every value of one role is split while the step runs; None: left to the compiler."""
        labels, shape, origin = role.labels, role.shape, role.origin
        if role.whole:
            return Constraint(self.computed(labels, shape, role.whole, is_routed=role.is_routed))
        if not any(label is not None for label in labels):
            return None
        is_weight = label_key(labels) in self.program.param_keys
        used = self.computed(labels, shape, is_routed=role.is_routed)
        if role.is_computed and (is_weight or origin & Origin.BATCH):
            return Constraint(used)
        if is_weight:
            kind = "optimizer" if origin & Origin.OPTIMIZER else "gradient" if origin & Origin.BATCH else "param"
            spec = self.stored(used, labels, shape, kind)
            return Constraint(spec, used=None if used == spec else used)
        return Constraint(used, is_open=True) if any(used) else None

    def unsplit(self, leaf: Leaf, labels: Labels) -> list[Reason]:
        """Returns why dims of a leaf that a mesh axis could shard are not sharded; none for what is annotated."""
        if annotated(leaf, self.mesh) is not None or leaf.kind == "batch":
            return []
        used = self.used(labels, leaf.shape)
        kind = self.kind(leaf, labels)
        spec = self.stored(used, labels, leaf.shape, kind)
        if leaf.shape and spec == used and self._stored_axes(used, kind):
            return []
        return self._reasons(labels, spec)

    def _reasons(self, labels: Labels, spec: Spec) -> list[Reason]:
        reasons = self.assignment.reasons
        pairs = zip(labels, spec, strict=True)
        return list(dict.fromkeys(reasons[at] for at, by in pairs if at is not None and at in reasons and not by))

    def _why(self, labels: Labels, spec: Spec, extra: str) -> str:
        return "; ".join(dict.fromkeys([extra] * bool(extra) + [str(each) for each in self._reasons(labels, spec)]))


def annotated(leaf: Leaf, mesh: MeshShape) -> Spec | None:
    """The spec the author wrote, where it names axes of this mesh; logical names are names of axes instead.

    A dim of size 1 is replicated, as JAX does for an annotation on an Auto mesh.

    Raises:
      SpanaxError: it does not divide the leaf.
    """
    if leaf.annotation is None or len(leaf.annotation) != len(leaf.shape) or not _mesh_axes(leaf, mesh):
        return None
    spec = tuple(
        tuple(axis for axis in _entries(entry) if axis in mesh.names) if size != 1 else ()
        for entry, size in zip(leaf.annotation, leaf.shape, strict=True)
    )
    for dim, (size, by) in enumerate(zip(leaf.shape, spec, strict=True)):
        if size % mesh.ways(by):
            raise SpanaxError(
                f"`{leaf.path}` is annotated to be split {'+'.join(by)} along dim {dim}, "
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
    """The constraints of a traced function's values, each found when it is asked for: alike values only once."""

    def __init__(self, resolver: Resolver, traced: Traced):
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
            return [self[at] for at in range(*value.indices(len(self)))]
        if value >= len(self):
            raise IndexError(value)
        role = self._traced.sharding_keys[value]  # equal ones are one object
        if id(role) not in self._known:
            self._known[id(role)] = self._resolver.constraint(role)
        return self._known[id(role)]


def resolve(program: Program, layout: Layout, mesh: MeshShape, pins: Pins, num_chunks: int = 1) -> Resolver:
    """A resolver for one program, layout and mesh; stages have so many chunks of the layers each.

    Raises:
      SpanaxError: the layout cannot be laid over this program on this mesh.
    """
    layout = pinned(layout, pins, program, mesh)
    return Resolver(program, layout, mesh, assign(program, layout, mesh, pins, num_chunks))
