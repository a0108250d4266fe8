"""Memory: what one device holds at the fullest moment of a step, found by walking the program in order.

A value is held from the kernel that makes it to the last one that reads it; inside a loop, on top of what is held
around it. What lives only inside a fused kernel is held nowhere. As with costs, sizes are global bytes over products
of mesh axes, so that one walk serves every mesh on which a layout resolves alike.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanax.plan.cost import ways_table
from spanax.plan.partition import Masks, as_masks, partition, union
from spanax.plan.resolve import Constraint, Constraints, Resolver
from spanax.plan.uses import use_of
from spanax.trace.axes import CONTRACTIONS
from spanax.trace.fusion import ALIASES
from spanax.trace.graph import Body, Op
from spanax.trace.program import Traced

Array = np.ndarray

GROUPS = ("activations", "gradients", "gathered weights")
"""What is held beside the state."""

HELD = {"param": "parameters", "optimizer": "optimizer", "other": "other state", "batch": "batch"}
"""The group of each kind of leaf."""

SCATTERS = ("scatter-add", "scatter_add")

Column = tuple[int, bool, bool, bool, int]
"""Values that are divided alike: split, grows with the batch, is stacked by layer, is attention scores, group."""


@dataclass(frozen=True, eq=False)
class Moment:
    """Bytes held at one point of a body, by column, and the body that runs there, if any."""

    held: Mapping[Column, float]
    inner: tuple["Level", ...]


@dataclass(frozen=True, eq=False)
class Level:
    """The fullest moments of one body."""

    moments: tuple[Moment, ...]


@dataclass(frozen=True, eq=False)
class State:
    """Leaves of the state and the batch: kind, global bytes, the axes that split them, if they are stacked by layer.

    Beside each parameter its gradient, as it is stored where several are added up.
    """

    kind: tuple[str, ...]
    num_bytes: Array
    split: Array
    stacked: Array


@dataclass(frozen=True, eq=False)
class Held:
    """Bytes of one device by group, one entry a candidate; `peak_bytes` is their sum and `reserve_bytes`."""

    groups: dict[str, Array]
    peak_bytes: Array


def state_of(resolver: Resolver) -> State:
    """Where the leaves of the state and of the batch lie, as the plan's placements have them."""
    program, bits = resolver.program, {axis: 1 << at for at, axis in enumerate(resolver.mesh.names)}
    axes = program.step.axes
    rows = []
    for leaf, value in zip((*program.leaves, *program.batch), program.step.graph.body.inputs, strict=True):
        labels = axes.classes[value]
        spec, _ = resolver.placed(leaf, labels)
        is_stacked = any(axes.names.get(label) == "layers" for label in labels if label is not None)
        rows.append((leaf.kind, leaf.num_bytes, union(as_masks(spec, bits)), is_stacked))
        if leaf.kind == "param":
            spec, _ = resolver.stored(labels, leaf.shape, "gradient")
            rows.append(("gradient", leaf.num_bytes, union(as_masks(spec, bits)), is_stacked))
    return State(
        kind=tuple(row[0] for row in rows),
        num_bytes=np.asarray([row[1] for row in rows], float),
        split=np.asarray([row[2] for row in rows], int),
        stacked=np.asarray([row[3] for row in rows], bool),
    )


def walk(resolver: Resolver, traced: Traced, constraints: Constraints | None = None) -> Level:
    """The fullest moments of a program under a layout."""
    constraints = constraints or resolver.constraints(traced)
    return _Walk(resolver, traced, constraints).level(traced.graph.body, outermost=True)


def held(
    state: State,
    level: Level,
    sizes: Array,
    *,
    num_stages: Array,
    num_microbatches: Array,
    in_flight: Array,
    scale: Array,
    fused_attention: bool = False,
) -> Held:
    """Bytes that one device holds on every mesh.

    Args:
      state: where the leaves lie; the batch's stay until the step ends.
      level: the program's fullest moments.
      sizes: a row for each mesh axis, a column for each mesh.
      num_stages: of the pipeline; what is stacked by layer is divided among them.
      num_microbatches: gradients are added up over them, in an array of their own if there are several.
      in_flight: the microbatches whose activations a stage holds at once.
      scale: the batch of one microbatch over the traced batch.
      fused_attention: whether attention scores are kept on the chip.
    """
    ways = ways_table(sizes)
    local = state.num_bytes[:, None] / ways[state.split] / np.where(state.stacked[:, None], num_stages, 1)
    of_kind = {kind: local[np.asarray([of == kind for of in state.kind], bool)].sum(0) for kind in (*HELD, "gradient")}
    groups = {name: of_kind[kind] for kind, name in HELD.items()}
    groups["batch"] = groups["batch"] * scale * num_microbatches  # all of it is there from the start
    columns = _Columns(ways, scale, num_stages, in_flight, fused_attention)
    peak = _peak(level, columns)
    for at, name in enumerate(GROUPS):
        groups[name] = peak[at]
    groups["gradients"] = groups["gradients"] + np.where(num_microbatches > 1, of_kind["gradient"], 0.0)
    return Held(groups, sum(groups.values()))


def _peak(level: Level, columns: "_Columns") -> Array:
    """Bytes by group at the fullest moment, candidate by candidate: an array (group, candidate)."""
    best = np.zeros((len(GROUPS), columns.count))
    for moment in level.moments:
        here = np.zeros_like(best)
        for column, num_bytes in moment.held.items():
            here[column[-1]] += num_bytes * columns.share(column)
        if moment.inner:
            inner = [_peak(one, columns) for one in moment.inner]
            totals = np.stack([one.sum(0) for one in inner])
            here = here + np.take_along_axis(np.stack(inner), totals.argmax(0)[None, None], 0)[0]
        best = np.where(here.sum(0) > best.sum(0), here, best)
    return best


class _Columns:
    """The share of a column's global bytes that one device holds."""

    def __init__(self, ways: Array, scale: Array, num_stages: Array, in_flight: Array, fused_attention: bool):
        self._ways, self._scale, self._stages, self._in_flight = ways, scale, num_stages, in_flight
        self._fused = fused_attention
        self.count = scale.shape[0]
        self._known: dict[Column, Array] = {}

    def share(self, column: Column) -> Array:
        """One number a candidate."""
        if column not in self._known:
            split, is_batched, is_stacked, is_score, _ = column
            share = 1.0 / self._ways[split]
            if is_batched:
                share = share * self._scale * (self._in_flight if is_stacked else 1.0)
            if is_stacked:
                share = share / self._stages
            self._known[column] = share * (0.0 if is_score and self._fused else 1.0)
        return self._known[column]


class _Walk:
    """One layout's walk over the bodies of a program."""

    def __init__(self, resolver: Resolver, traced: Traced, constraints: Constraints):
        self.resolver, self.traced, self.constraints = resolver, traced, constraints
        self.bits = {axis: 1 << at for at, axis in enumerate(resolver.mesh.names)}
        self.kept = traced.kept
        leaves = len(resolver.program.leaves)
        # State and batch are counted apart, and what replaces the state takes its place.
        self.counted = {*traced.graph.body.inputs, *traced.graph.body.outputs[:leaves]}
        self._column: dict[tuple[int, int], tuple[Column, float]] = {}

    def level(self, body: Body, *, outermost: bool = False) -> Level:
        """The moments of a body at which more may be held than at any other."""
        kept, last = self._lifetimes(body)
        held: Counter[Column] = Counter()
        dies: dict[int, list[int]] = defaultdict(list)
        moments: list[Moment] = []
        gathered = self._gathered(body)
        released: dict[int, list[tuple[Column, float]]] = defaultdict(list)
        for value in () if outermost else body.inputs:
            self._begin(value, held, dies, last)
        for at, op in enumerate(body.ops):
            for value in op.outputs:
                if value in kept and value in last:
                    self._begin(value, held, dies, last)
            for end, column, num_bytes in gathered.get(at, ()):
                held[column] += num_bytes  # type: ignore[assignment]
                released[end].append((column, num_bytes))
            inner = tuple(self.level(one) for one in op.bodies)
            partial = self._partial(op)
            if inner or partial or at in dies:
                moments.append(Moment(dict(held + partial), inner))
            for column, num_bytes in released.pop(at, ()):
                held[column] -= num_bytes  # type: ignore[assignment]
            for value in dies.pop(at, ()):
                column, num_bytes = self._of(value)
                held[column] -= num_bytes  # type: ignore[assignment]
        return Level(_fullest(moments))

    def _lifetimes(self, body: Body) -> tuple[set[int], dict[int, int]]:
        """The values of a body that are held, and the last operation that needs each.

        A matmul makes what it alone reads out of what that was made from; and numbers put one into each row of zeros,
        as in the gradient of a cross-entropy, are put there by whoever reads them.

        Source: the buffers of the steps in tests/data/truth/aot_probe.csv, compiled for TPUs.
        """
        graph, plan = self.traced.graph, self.kept[body]
        readers: dict[int, set[str]] = defaultdict(set)
        for op in body.ops:
            for value in () if op.name in ALIASES else op.inputs:
                readers[plan.of(value)].add(op.name)
        for value in body.outputs:
            readers[plan.of(value)].add("")
        last, made_where_read = dict(plan.last_reads), set()
        for op in body.ops:
            for value in op.outputs:
                if value in plan.written and readers[value] and readers[value] <= set(CONTRACTIONS):
                    made_where_read.add(value)
                    last |= {of: max(last.get(of, 0), last.get(value, 0)) for of in plan.sources(value)}
            if op.name in SCATTERS and op.params["dimension_numbers"].operand_batching_dims:
                if graph.shape(plan.of(op.inputs[0])) == ():
                    made_where_read.update(op.outputs)
        return plan.kept - made_where_read, last

    def _begin(self, value: int, held: Counter[Column], dies: dict[int, list[int]], last: dict[int, int]) -> None:
        if value in self.counted:
            return
        column, num_bytes = self._of(value)
        held[column] += num_bytes  # type: ignore[assignment]
        dies[last.get(value, -1)].append(value)

    def _gathered(self, body: Body) -> dict[int, list[tuple[int, Column, float]]]:
        """Stored weights as they are used: where each is first gathered, until where it is held, how large it is."""
        spans: dict[tuple[int, Constraint], list[int]] = {}
        for at, op in enumerate(body.ops):
            use = (
                None
                if op.bodies or op in self.traced.inert
                else use_of(self.resolver, self.traced, op, self.constraints)
            )
            for value, asked in zip(op.inputs, use.inputs, strict=True) if use is not None else ():
                if asked is not None:
                    spans.setdefault((value, asked), [at, at])[1] = at
        found: dict[int, list[tuple[int, Column, float]]] = defaultdict(list)
        for (value, asked), (first, end) in spans.items():
            column, num_bytes = self._of(value, asked, group=2)
            found[first].append((end, column, num_bytes))
        return found

    def _partial(self, op: Op) -> Counter[Column]:
        """Sums that are whole on every device before each keeps its part: the gradient of a stored weight."""
        found: Counter[Column] = Counter()
        if op.name not in CONTRACTIONS:
            return found
        traced = self.traced
        ins = [self._masks(value) for value in op.inputs]
        split = partition(traced.graph, traced.axes.classes, op, ins, [self._masks(value) for value in op.outputs])
        for shift in split.shifts:
            if shift.kind == "reduce-scatter":
                (_, *rest), num_bytes = self._of(shift.value)
                found[(shift.kept, *rest)] += num_bytes  # type: ignore[assignment, index]
        return found

    def _masks(self, value: int) -> Masks:
        constraint = self.constraints[value]
        if constraint is None:
            return (0,) * len(self.traced.graph.shape(value))
        return as_masks(constraint.spec, self.bits)

    def _of(self, value: int, asked: Constraint | None = None, group: int | None = None) -> tuple[Column, float]:
        role, aval = self.traced.roles[value], self.traced.graph.avals[value]
        itemsize = getattr(aval.dtype, "itemsize", 4)  # values of one role may differ in it
        key = (id(role), itemsize)
        if key not in self._column or asked is not None:
            traced, labels = self.traced, role.labels
            constraint = asked or self.constraints[value]
            split = 0 if constraint is None else union(as_masks(constraint.spec, self.bits))
            is_batched = any(label in traced.batch_labels for label in labels)
            names = [traced.axes.names.get(label) for label in labels if label is not None]
            is_stacked = "layers" in names
            where = group if group is not None else 0 if is_batched or not labels else 1
            column = (split, is_batched, is_stacked, traced.is_score(labels), where)
            num_bytes = float(np.prod(aval.shape)) * itemsize
            if asked is not None:
                return column, num_bytes
            self._column[key] = (column, num_bytes)
        return self._column[key]


def _fullest(moments: list[Moment]) -> tuple[Moment, ...]:
    """Those that no other one covers in every column, bodies inside aside."""
    kept: list[Moment] = []
    for moment in sorted(moments, key=lambda one: -sum(one.held.values())):
        if moment.inner or not any(_covers(other, moment) for other in kept):
            kept.append(moment)
    return tuple(kept)


def _covers(other: Moment, moment: Moment) -> bool:
    return all(other.held.get(column, 0.0) >= size for column, size in moment.held.items())


def by_name(found: Mapping[str, Any], at: int) -> dict[str, int]:
    """One candidate's bytes by group."""
    return {name: int(values[at]) for name, values in found.items()}
