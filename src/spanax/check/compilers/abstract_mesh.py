"""Runs the partitioner's passes (Shardy) on an abstract mesh and collects the collectives of the partitioned step.

This takes about a second for any number of devices. The passes are private bindings of jaxlib, so `is_available` checks
for them. XLA's later optimizations, such as combining collectives or hoisting them out of loops, are not included.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from spanax.check.hlo.collectives import Collective
from spanax.check.hlo.module import user_line
from spanax.check.hlo.replica_groups import ReplicaGroups, axes_of
from spanax.compat import ir_context, pass_manager
from spanax.hardware.mesh import MeshShape

PASSES = (
    "builtin.module(sdy-propagation-pipeline)",
    # Without the option, only the reshards needed for correctness become explicit, and all-reduces are omitted.
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))",
    "builtin.module(func.func(sdy-reshard-to-collectives))",
)

AXES_ATTRIBUTES = {
    "all-gather": "gathering_axes",
    "all-reduce": "reduction_axes",
    "reduce-scatter": "reduce_scatter_axes",
    "all-to-all": "params",
    "collective-permute": "out_sharding",
}
"""The attribute of Shardy's operation with the mesh axes of a collective."""

_AXIS_REFERENCE = re.compile(r'axis_ref<name = "(\w+)">')
_AXIS = re.compile(r'"(\w+)"(?::\((\d+)\)(\d+))?')
_LINE = re.compile(r'"([^"]+)":(\d+):')
_BITS = re.compile(r"\d+")


@functools.cache
def is_available() -> bool:
    """Returns whether this jaxlib provides the passes."""
    try:
        with ir_context():
            for pipeline in PASSES:
                pass_manager(pipeline)
    except Exception:  # Private names change between versions, so any exception means that they are missing.
        return False
    return True


def abstract_collectives(module: Any, mesh: MeshShape) -> tuple[Collective, ...]:
    """Returns the collectives of a lowered step, largest first. Modifies the module."""
    with module.context:
        for pipeline in PASSES:
            pass_manager(pipeline).run(module.operation)
        functions = {op.attributes["sym_name"].value: op for op in module.body.operations if _name(op) == "func.func"}
        collectives = list(_Collector(functions, mesh).block(functions["main"].regions[0].blocks[0], 1, True))
    return tuple(sorted(collectives, key=lambda move: (-move.num_bytes, move.kind, move.name)))


class _Collector:
    """Yields the collectives of a module's functions, starting with `main`."""

    def __init__(self, functions: dict[str, Any], mesh: MeshShape):
        self.functions = functions
        self.mesh = mesh

    def block(self, block: Any, runs: int, is_counted: bool) -> Iterator[Collective]:
        """Yields the collectives of a block; identical collectives of the same value count once."""
        seen = set[Any]()
        for op in block.operations:
            name = _name(op)
            dialect, _, kind = name.replace("_", "-").partition(".")
            if kind in AXES_ATTRIBUTES and dialect == "sdy":
                key = (op.operands[0], name, str(op.results[0].type), str(op.attributes["out_sharding"]))
                if key not in seen:
                    seen.add(key)
                    yield from self._collectives(op, kind, runs, is_counted)
            elif kind in AXES_ATTRIBUTES:  # StableHLO inside a `shard_map`, with per-device shapes
                groups = _groups(op, self.mesh)
                names = axes_of(groups, dict(self.mesh.axes))
                for result in op.results if names else ():
                    yield _collective(op, kind, names, result, 1, len(groups[0]), runs, is_counted)
            elif name == "func.call":
                called = self.functions[op.attributes["callee"].value]
                yield from self.block(called.regions[0].blocks[0], runs, is_counted)
            elif name == "stablehlo.while":
                count = _trip_count(op)
                is_known = is_counted and count is not None
                yield from self.block(op.regions[1].blocks[0], runs * (count or 1), is_known)
            else:
                for region in op.regions:
                    for inner in region.blocks if name != "stablehlo.reduce" else ():
                        yield from self.block(inner, runs, is_counted)

    def _collectives(self, op: Any, kind: str, runs: int, is_counted: bool) -> Iterator[Collective]:
        """Yields the collective of an operation of Shardy, whose result has a global shape, if it has mesh axes."""
        axes, out_axes = (_axes(str(op.attributes[name])) for name in (AXES_ATTRIBUTES[kind], "out_sharding"))
        is_sliced = kind == "all-reduce" and bool(axes) and _sliced_axes(op) == axes
        if is_sliced:
            kind, out_axes = "reduce-scatter", out_axes | axes
        names = [axis for axis in self.mesh.names if axis in {entry[0] for entry in axes}]
        if names:
            is_partial = any(entry[1] for entry in axes)
            num_shards = _num_shards(out_axes, self.mesh)
            group_size = _num_shards(axes, self.mesh)
            move = _collective(
                op, kind, "~" * is_partial + "+".join(names), op.results[0], num_shards, group_size, runs, is_counted
            )
            yield replace(move, written="all-reduce and a slice") if is_sliced else move


def _collective(
    op: Any, kind: str, axes: str, result: Any, num_shards: int, group_size: int, runs: int, is_counted: bool
) -> Collective:
    dtype, dims = _type(result.type)
    shards = f" in {num_shards} shards" if num_shards > 1 else ""
    return Collective(
        kind=kind,
        axes=axes,
        dtype=dtype,
        shapes=f"{dtype}[{','.join(map(str, dims))}]{shards}",
        bytes_once=-(-math.prod(dims) * int((_BITS.search(dtype) or ["8"])[0]) // 8) // num_shards,
        runs=runs,
        group_size=group_size,
        name=_name(op),
        op_name=_op_name(str(op.location)),
        source=user_line([(file, int(line)) for file, line in _LINE.findall(str(op.location))]),
        is_counted=is_counted,
    )


def _groups(op: Any, mesh: MeshShape) -> ReplicaGroups:
    """Returns the replica groups, which are listed or, since jax 0.11, given as mesh axes; of a permute, its pairs."""
    permuted = "source_target_pairs" in op.attributes
    groups = op.attributes["source_target_pairs" if permuted else "replica_groups"]
    partitions = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    if _AXIS_REFERENCE.search(str(groups)):
        axes = [mesh.names.index(name) for name in _AXIS_REFERENCE.findall(str(groups))]
        trailing = range(partitions.ndim - len(axes), partitions.ndim)
        rows = np.moveaxis(partitions, axes, trailing).reshape(-1, math.prod(partitions.shape[axis] for axis in axes))
    else:
        rows = np.asarray(groups)
    return tuple(map(tuple, rows.tolist()))


def _name(op: Any) -> str:
    return op.operation.name


Axes = set[tuple[str, str, str]]


def _axes(text: str) -> Axes:
    """Returns the mesh axes in an attribute, each with the (outer, size) of a sub-axis, or empty strings."""
    return set(_AXIS.findall(text.split("@mesh", 1)[-1]))


def _num_shards(axes: Axes, mesh: MeshShape) -> int:
    count = 1
    for name, _, size in axes:
        count *= int(size) if size else mesh.ways([name])
    return count


def _sliced_axes(op: Any) -> Axes:
    """Returns the axes over which every user of an all-reduce slices it."""
    users = [use.owner for use in op.results[0].uses]
    if not users or any(user.operation.name != "sdy.all_slice" for user in users):
        return set()
    axes = [_axes(str(user.attributes["slicing_axes"])) for user in users]
    return axes[0] if all(other == axes[0] for other in axes) else set()


def _type(tensor: Any) -> tuple[str, tuple[int, ...]]:
    dtype = str(tensor.element_type)
    short = {"i1": "pred8", "i8": "s8", "i32": "s32", "ui32": "u32", "i64": "s64"}
    return short.get(dtype, dtype), tuple(tensor.shape)


def _trip_count(loop: Any) -> int | None:
    """Returns the trip count of a loop that counts up by 1 to a constant, like a lowered `scan`; None for others."""
    condition, body = (region.blocks[0] for region in loop.regions)
    *_, compare, _ = condition.operations
    if _name(compare) != "stablehlo.compare" or "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    counter, bound = compare.operands
    positions = [position for position, argument in enumerate(condition.arguments) if argument == counter]
    limit = _constant(bound)
    if len(positions) != 1 or limit is None:
        return None
    position = positions[0]
    start = _constant(loop.operands[position])
    next_value = list(body.operations)[-1].operands[position]
    step = next_value.owner
    adds = getattr(step, "operation", None) is not None and step.operation.name == "stablehlo.add"
    if start is None or not adds or step.operands[0] != body.arguments[position] or _constant(step.operands[1]) != 1:
        return None
    return max(0, limit - start)


def _constant(value: Any) -> int | None:
    owner = value.owner
    if getattr(owner, "operation", None) is None or owner.operation.name not in ("sdy.constant", "stablehlo.constant"):
        return None
    literal = re.search(r"dense<(-?\d+)>", str(owner.attributes["value"]))
    return int(literal[1]) if literal else None


def _op_name(location: str) -> str:
    match = re.search(r'"(jit\([^"]*)"', location)
    return match[1] if match else ""
