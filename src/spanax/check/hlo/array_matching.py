"""Matches collectives to parameters by shape, because compiled programs have no array names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from spanax.check.hlo.collectives import Collective
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement


def with_arrays(moves: Sequence[Collective], plan: Plan) -> tuple[Collective, ...]:
    """Returns the collectives with the paths of the parameters that they gather or whose gradients they reduce.

    A result matches a parameter if it has the same dims in any order, except for the stacked layer dim; a
    reduce-scatter matches the dims of the local shard.
    """
    params = [leaf for leaf in plan.leaves if leaf.kind == "param"]
    by_shape: dict[tuple[int, ...], list[str]] = {}
    by_local_shape: dict[tuple[int, ...], list[str]] = {}
    for leaf in params:
        by_shape.setdefault(_key(leaf, leaf.shape), []).append(leaf.path)
        by_local_shape.setdefault(_key(leaf, leaf.local_shape), []).append(leaf.path)
    return tuple(_with(move, by_local_shape if move.kind == "reduce-scatter" else by_shape) for move in moves)


def _with(move: Collective, paths: dict[tuple[int, ...], list[str]]) -> Collective:
    if move.kind not in ("all-gather", "all-reduce", "reduce-scatter"):
        return move
    shapes = re.findall(r"\[([\d,]*)\]", move.shapes)
    matches = {path: None for shape in shapes for path in paths.get(_sizes(shape), ())}
    return replace(move, tensors=tuple(matches))


def _key(leaf: Placement, shape: Sequence[int]) -> tuple[int, ...]:
    return _without_ones(size for axis, size in zip(leaf.axes, shape, strict=True) if axis != "layers")


def _sizes(shape: str) -> tuple[int, ...]:
    return _without_ones(int(size) for size in filter(None, shape.split(",")))


def _without_ones(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in sizes if size != 1))
