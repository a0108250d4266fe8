"""Lists the changes of a layout that a local search tries: a named axis over one more mesh axis, or over another."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import PIPE, Layout
from spanax.plan.sharding.resolve import axes_of
from spanax.plan.spmd.sharded_program import ShardedProgram

FIXED = frozenset({"batch", "layers", "steps", "window"})
"""Axes that stay as the preset has them: schedules count examples and layers; loops and windows are not sharded."""

LEAST_SHARE = 0.02
"""The smallest share of the elements of a step that a change has to shard further. Source: a judgment."""

Shares = Mapping[tuple[str, str], float]
"""For each mesh axis and named axis, a share of the elements that a device computes in a step."""


@dataclass(frozen=True, eq=False)
class Move:
    """A layout that differs in one assignment, and the share of the elements whose sharding it may change."""

    layout: Layout
    share: float


def moves(sharded: ShardedProgram, layout: Layout, pins: Mapping[str, object]) -> list[Move]:
    """Returns the layouts that differ from a layout in one assignment, the largest share of elements first.

    Args:
      sharded: the program under `layout`.
      layout: the layout, without pins.
      pins: the axes that the user pinned; their assignments stay.
    """
    free, used = _shares(sharded)
    mesh = sharded.resolver.mesh
    result = [
        move
        for axis, _ in layout.computed
        if axis != PIPE and mesh.ways([axis]) > 1
        for name in sorted(sharded.traced.labels_by_name.keys() - FIXED - pins.keys())
        for move in _moves(layout, mesh, axis, name, free.get((axis, name), 0.0), used.get((axis, name), 0.0))
    ]
    return sorted((move for move in result if move.share >= LEAST_SHARE), key=lambda move: -move.share)


def assignment_text(layout: Layout, preset: Layout) -> str:
    """Returns the assignments of a layout that its preset does not have.

    Example:
      >>> preset = Layout("data+tensor", (("data", ("batch",)), ("model", ("mlp", "vocab"))))
      >>> changed = Layout("", (("data", ("batch", "vocab")), ("model", ("vocab",))))
      >>> assignment_text(changed, preset)
      'mlp replicated, vocab over data and model'
    """
    names = {name for each in (layout, preset) for _, axis_names in each.computed for name in axis_names}
    parts = []
    for name in sorted(names):
        before, after = (_over(each, name) for each in (preset, layout))
        if before != after and after:
            parts.append(f"{name} over {' and '.join(after)}")
        elif before != after:
            parts.append(f"{name} replicated")
    return ", ".join(parts)


def _over(layout: Layout, name: str) -> list[str]:
    return [axis for axis, names in layout.computed if name in names]


def _moves(layout: Layout, mesh: MeshShape, axis: str, name: str, free: float, used: float) -> Iterator[Move]:
    """Yields the layouts that shard a named axis over one more mesh axis, or over another one."""
    names = layout.splits(axis)
    if name in names:
        return
    yield Move(_with(layout, axis, (*names, name)), free)
    if axis in layout.exclusive:
        yield Move(_with(layout, axis, (name, *names)), max(free, used))
    for other, other_names in layout.computed:
        if other != axis and name in other_names and len(other_names) > 1 and mesh.ways([other]) > 1:
            without = _with(layout, other, tuple(each for each in other_names if each != name))
            yield Move(_with(without, axis, (*names, name)), free)


def _with(layout: Layout, axis: str, names: tuple[str, ...]) -> Layout:
    return replace(layout, computed=tuple((each, names if each == axis else old) for each, old in layout.computed))


def _shares(sharded: ShardedProgram) -> tuple[Shares, Shares]:
    """Returns the shares of elements of values with a named axis that a mesh axis does not shard, and that it shards.

    Counts the results of all operations of a step on one device; the first bounds what sharding the named axis over the
    mesh axis may save.
    """
    traced = sharded.traced
    mesh = sharded.resolver.mesh
    axes = sharded.traced.axes
    runs: dict[int, int] = defaultdict(int)
    values: dict[int, int] = {}
    for group in traced.op_groups:
        for value in group.op.outputs if not group.op.bodies else ():
            number = traced.sharding_keys[value].number
            runs[number] += group.runs
            values.setdefault(number, value)
    names: dict[int, list[str]] = defaultdict(list)
    for name, labels in traced.labels_by_name.items():
        for label in labels:
            names[label].append(name)
    free: dict[tuple[str, str], float] = defaultdict(float)
    used: dict[tuple[str, str], float] = defaultdict(float)
    total = 0.0
    for number, value in values.items():
        key = traced.sharding_keys[value]
        constraint = sharded.constraints[value]
        over = axes_of(constraint.computed) if constraint is not None else set()
        size = runs[number] * math.prod(traced.graph.shape(value)) / mesh.ways([*over])
        total += size
        for axis, ways in mesh.axes:
            shares = used if axis in over else free
            for name in {
                name
                for label in key.labels
                if label is not None and axes.ways[label] % ways == 0
                for name in names[label]
            }:
                shares[axis, name] += size
    return ({key: size / total for key, size in shares.items()} for shares in (free, used))  # type: ignore[return-value]
