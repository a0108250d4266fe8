"""Tensors: the arrays of the state that a collective serves, told by their shape; compilers keep no names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from spanax.check.hlo.collectives import Collective
from spanax.plan.plan import Placement, Plan


def with_arrays(found: Sequence[Collective], plan: Plan) -> tuple[Collective, ...]:
    """The collectives with the paths of the parameters that they gather, or whose gradients they add up.

    A result counts for a parameter if it has its dims, in any order, without those stacked by layer; of a
    reduce-scatter, as one device keeps them.
    """
    params = [leaf for leaf in plan.leaves if leaf.kind == "param"]
    by_whole: dict[tuple[int, ...], list[str]] = {}
    by_kept: dict[tuple[int, ...], list[str]] = {}
    for leaf in params:
        by_whole.setdefault(_key(leaf, leaf.shape), []).append(leaf.path)
        by_kept.setdefault(_key(leaf, leaf.local_shape), []).append(leaf.path)
    return tuple(_with(one, by_kept if one.kind == "reduce-scatter" else by_whole) for one in found)


def _with(one: Collective, paths: dict[tuple[int, ...], list[str]]) -> Collective:
    if one.kind not in ("all-gather", "all-reduce", "reduce-scatter"):
        return one
    shapes = re.findall(r"\[([\d,]*)\]", one.shapes)
    found = {path: None for shape in shapes for path in paths.get(_sizes(shape), ())}
    return replace(one, tensors=tuple(found))


def _key(leaf: Placement, shape: Sequence[int]) -> tuple[int, ...]:
    return _without_ones(size for axis, size in zip(leaf.axes, shape, strict=True) if axis != "layers")


def _sizes(shape: str) -> tuple[int, ...]:
    return _without_ones(int(size) for size in filter(None, shape.split(",")))


def _without_ones(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in sizes if size != 1))
