"""Abstract: the partitioner's own passes on a mesh without devices, in this process, in about a second at any size.

These passes (Shardy) are bound in jaxlib and promised nowhere, so they are looked for before they are used. They are
not all that XLA does: gathers that it merges or moves out of loops are here as they are asked for.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spanax.check.hlo.collectives import Collective
from spanax.check.hlo.replica_groups import ReplicaGroups, axes_of
from spanax.check.lint.source_lines import user_line
from spanax.hardware.mesh import MeshShape

PASSES = (
    "builtin.module(sdy-propagation-pipeline)",
    # Without the option only what must be resharded to stay right becomes explicit, and sums are left out.
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))",
    "builtin.module(func.func(sdy-reshard-to-collectives))",
)

NAMES = {
    "sdy.all_gather": ("all-gather", "gathering_axes"),
    "sdy.all_reduce": ("all-reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce-scatter", "reduce_scatter_axes"),
    "sdy.all_to_all": ("all-to-all", "params"),
    "sdy.collective_permute": ("collective-permute", ""),
}
"""Shardy's operations -> kinds, and the attribute with their mesh axes."""

MANUAL = {
    "stablehlo.all_gather": "all-gather",
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
    "stablehlo.reduce_scatter": "reduce-scatter",
}
"""Collectives inside of a `shard_map`, where shapes are those of one device -> kinds."""

_AXIS_REFERENCE = re.compile(r'axis_ref<name = "(\w+)">')
_AXIS = re.compile(r'"(\w+)"(?::\((\d+)\)(\d+))?')
_LINE = re.compile(r'"([^"]+)":(\d+):')
_BITS = re.compile(r"\d+")


@functools.cache
def is_available() -> bool:
    """Whether this jaxlib has the passes."""
    try:
        from jax._src.interpreters import mlir
        from jaxlib.mlir import passmanager

        with mlir.make_ir_context():
            for one in PASSES:
                passmanager.PassManager.parse(one)
    except Exception:  # of whatever kind: private names come and go with versions
        return False
    return True


def abstract_collectives(module: Any, mesh: MeshShape) -> tuple[Collective, ...]:
    """The collectives of a lowered step, the largest first; the module is changed on the way."""
    from jaxlib.mlir import passmanager

    with module.context:
        for one in PASSES:
            passmanager.PassManager.parse(one).run(module.operation)
        functions = {op.attributes["sym_name"].value: op for op in module.body.operations if _name(op) == "func.func"}
        found = list(_Walk(functions, mesh).of(functions["main"].regions[0].blocks[0], 1, True))
    return tuple(sorted(found, key=lambda one: (-one.num_bytes, one.kind, one.name)))


class _Walk:
    """One walk over a module's functions, from `main` down."""

    def __init__(self, functions: dict[str, Any], mesh: MeshShape):
        self.functions, self.mesh = functions, mesh

    def of(self, block: Any, runs: int, is_counted: bool) -> Iterator[Collective]:
        """The collectives of a block; the same move of the same value counts once."""
        seen = set[Any]()
        for op in block.operations:
            name = _name(op)
            if name in NAMES:
                key = (op.operands[0], name, str(op.results[0].type), str(op.attributes["out_sharding"]))
                if key not in seen:
                    seen.add(key)
                    yield from self._one(op, name, runs, is_counted)
            elif name in MANUAL:
                yield from self._manual(op, MANUAL[name], runs, is_counted)
            elif name == "func.call":
                called = self.functions[op.attributes["callee"].value]
                yield from self.of(called.regions[0].blocks[0], runs, is_counted)
            elif name == "stablehlo.while":
                count = _trips(op)
                known = is_counted and count is not None
                yield from self.of(op.regions[1].blocks[0], runs * (count or 1), known)
            else:
                for region in op.regions:
                    for inner in region.blocks if name != "stablehlo.reduce" else ():
                        yield from self.of(inner, runs, is_counted)

    def _one(self, op: Any, name: str, runs: int, is_counted: bool) -> Iterator[Collective]:
        kind, attribute = NAMES[name]
        out = str(op.attributes["out_sharding"])
        over = _axes(str(op.attributes[attribute])) if attribute else _axes(out)
        result, kept = op.results[0], _axes(out)
        sliced = _sliced(op) if kind == "all-reduce" else set()
        if over and sliced == over:
            kind, kept = "reduce-scatter", kept | over
        names = [axis for axis in self.mesh.names if axis in {one[0] for one in over}]
        if not names:
            return
        is_partial = any(one[1] for one in over)
        dtype, dims = _type(result.type)
        num_bytes = _num_bytes(dtype, dims)
        ways = _ways(kept, self.mesh)
        yield Collective(
            kind=kind,
            axes="~" * is_partial + "+".join(names),
            dtype=dtype,
            shapes=f"{dtype}[{','.join(map(str, dims))}] split {ways} ways" if ways > 1 else f"{dtype}{list(dims)}",
            bytes_once=num_bytes // ways,
            runs=runs,
            group_size=_ways(over, self.mesh),
            name=name,
            op_name=_op_name(str(op.location)),
            source=_source(op),
            written="all-reduce and a slice" if sliced == over and over else "",
            is_counted=is_counted,
        )

    def _manual(self, op: Any, kind: str, runs: int, is_counted: bool) -> Iterator[Collective]:
        """A collective of a `shard_map`, each of whose results is one device's."""
        groups = _groups(op, self.mesh)
        names = axes_of(groups, dict(self.mesh.axes))
        for result in op.results if names else ():
            dtype, dims = _type(result.type)
            yield Collective(
                kind=kind,
                axes=names,
                dtype=dtype,
                shapes=f"{dtype}{list(dims)}",
                bytes_once=_num_bytes(dtype, dims),
                runs=runs,
                group_size=len(groups[0]),
                name=_name(op),
                op_name=_op_name(str(op.location)),
                source=_source(op),
                is_counted=is_counted,
            )


def _groups(op: Any, mesh: MeshShape) -> ReplicaGroups:
    """Places in the mesh that communicate: listed, or (from jax 0.11 on) as mesh axes; of a permute pairs."""
    permuted = "source_target_pairs" in op.attributes
    groups = op.attributes["source_target_pairs" if permuted else "replica_groups"]
    places = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    if _AXIS_REFERENCE.search(str(groups)):
        over = [mesh.names.index(name) for name in _AXIS_REFERENCE.findall(str(groups))]
        last = range(places.ndim - len(over), places.ndim)
        rows = np.moveaxis(places, over, last).reshape(-1, math.prod(places.shape[axis] for axis in over))
    else:
        rows = np.asarray(groups)
    return tuple(map(tuple, rows.tolist()))


def _source(op: Any) -> str:
    return user_line([(file, int(line)) for file, line in _LINE.findall(str(op.location))])


def _num_bytes(dtype: str, dims: Sequence[int]) -> int:
    return -(-math.prod(dims) * int((_BITS.search(dtype) or ["8"])[0]) // 8)


def _name(op: Any) -> str:
    return op.operation.name


Axes = set[tuple[str, str, str]]


def _axes(text: str) -> Axes:
    """The mesh axes in an attribute, each with the (outer, size) of the part that is meant, if not all of it."""
    return set(_AXIS.findall(text.split("@mesh", 1)[-1]))


def _ways(axes: Axes, mesh: MeshShape) -> int:
    ways = 1
    for name, _, size in axes:
        ways *= int(size) if size else mesh.ways([name])
    return ways


def _sliced(op: Any) -> Axes:
    """The axes over which all that reads a sum splits it."""
    users = [use.owner for use in op.results[0].uses]
    if not users or any(user.operation.name != "sdy.all_slice" for user in users):
        return set()
    found = [_axes(str(user.attributes["slicing_axes"])) for user in users]
    return found[0] if all(one == found[0] for one in found) else set()


def _type(tensor: Any) -> tuple[str, tuple[int, ...]]:
    dtype = str(tensor.element_type)
    short = {"i1": "pred8", "i8": "s8", "i32": "s32", "ui32": "u32", "i64": "s64"}
    return short.get(dtype, dtype), tuple(tensor.shape)


def _trips(loop: Any) -> int | None:
    """How often a loop runs that counts up by one to a constant, as `scan` and `fori_loop` are lowered; or None."""
    condition, body = (region.blocks[0] for region in loop.regions)
    *_, compared, _ = condition.operations
    if _name(compared) != "stablehlo.compare" or "LT" not in str(compared.attributes["comparison_direction"]):
        return None
    counter, bound = compared.operands
    places = [at for at, argument in enumerate(condition.arguments) if argument == counter]
    limit = _constant(bound)
    if len(places) != 1 or limit is None:
        return None
    at = places[0]
    start, after = _constant(loop.operands[at]), list(body.operations)[-1].operands[at]
    step = after.owner
    adds = getattr(step, "operation", None) is not None and step.operation.name == "stablehlo.add"
    if start is None or not adds or step.operands[0] != body.arguments[at] or _constant(step.operands[1]) != 1:
        return None
    return max(0, limit - start)


def _constant(value: Any) -> int | None:
    owner = value.owner
    if getattr(owner, "operation", None) is None or owner.operation.name not in ("sdy.constant", "stablehlo.constant"):
        return None
    told = re.search(r"dense<(-?\d+)>", str(owner.attributes["value"]))
    return int(told[1]) if told else None


def _op_name(location: str) -> str:
    told = re.search(r'"(jit\([^"]*)"', location)
    return told[1] if told else ""
