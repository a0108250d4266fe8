"""Formats where the arrays of a plan or a run are placed, as text and JSON."""

from collections.abc import Sequence
from typing import Any

from spanax.check.array_placement import ArrayPlacement, copies, shards
from spanax.plan.plan import path_pattern
from spanax.plan.sharding.placement import Placement
from spanax.show.drawing import devices_text
from spanax.show.tables import table_text
from spanax.units import bytes_text

MAX_REPLICATED = 12
"""Number of replicated arrays that are listed."""


def placement_text(placement: ArrayPlacement) -> str:
    """Returns bytes per device, replicated arrays, and a table with one row per kind of array."""
    plan, mesh = placement.plan, placement.plan.mesh
    state = ", ".join(f"{kind} {bytes_text(plan.state_bytes(kind))}" for kind in ("param", "optimizer", "other"))
    lines = [
        f"{plan.layout.name} on {mesh.size} devices ({mesh}), as in the {placement.origin}",
        f"each device holds {state} = {bytes_text(plan.state_bytes())}"
        + (f", and {bytes_text(plan.host_bytes)} in host memory" if plan.host_bytes else ""),
    ]
    for path, planned, saved in placement.elsewhere:
        lines.append(f"ELSEWHERE {path}: planned {_spec_text(planned)}, saved {_spec_text(saved)}")
    lines += _replicated_lines(placement)
    heads = ("array", "shape", "spec", "parts", "copies", "per device", "devices of the first part")
    rows = []
    for leaf in distinct_arrays(placement):
        parts = shards(leaf, mesh)
        shape = " ".join(f"{name or '?'}:{size}" for name, size in zip(leaf.axes, leaf.shape, strict=True))
        rows.append((
            leaf.path, shape, _spec_text(leaf.spec), str(len(parts)), str(copies(leaf, mesh)),
            bytes_text(leaf.local_bytes), devices_text(parts[0].devices),
        ))  # fmt: skip
    return "\n".join([*lines, "", table_text(heads, rows)])


def _replicated_lines(placement: ArrayPlacement) -> list[str]:
    replicated, mesh = _replicated(placement), placement.plan.mesh
    if not replicated:
        return []
    redundant = bytes_text(sum(_redundant_bytes(leaf, placement) for leaf in replicated))
    lines = [f"{len(replicated)} arrays are replicated, {redundant} per device of redundant copies:"]
    for leaf in replicated[:MAX_REPLICATED]:
        reason = f"; {leaf.reason}" if leaf.reason else ""
        lines.append(f"  {leaf.path} {copies(leaf, mesh)} times, {bytes_text(leaf.local_bytes)} per device{reason}")
    if len(replicated) > MAX_REPLICATED:
        lines.append(f"  and {len(replicated) - MAX_REPLICATED} smaller ones")
    return lines


def placement_json(placement: ArrayPlacement) -> dict[str, Any]:
    """Returns the object of `spanax inspect --json`."""
    plan = placement.plan
    return {
        "from": placement.origin,
        "layout": plan.layout.name,
        "mesh": dict(plan.mesh.axes),
        "bytes_per_device": {kind: plan.state_bytes(kind) for kind in ("param", "optimizer", "other")},
        "host_bytes_per_device": plan.host_bytes,
        "elsewhere": [
            {"path": path, "planned": planned, "saved": saved} for path, planned, saved in placement.elsewhere
        ],
        "copied": [
            {"path": leaf.path, "copies": copies(leaf, plan.mesh), "bytes": leaf.local_bytes}
            for leaf in _replicated(placement)
        ],
        "leaves": [leaf_json(placement, leaf) for leaf in plan.leaves + plan.batch],
    }


def leaf_json(placement: ArrayPlacement, leaf: Placement) -> dict[str, Any]:
    """Returns one array as plain values; bytes per device."""
    return {
        "path": leaf.path,
        "kind": leaf.kind,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "axes": list(leaf.axes),
        "spec": [list(axes) for axes in leaf.spec],
        "bytes": leaf.local_bytes,
        "memory_kind": leaf.memory_kind,
        "copies": copies(leaf, placement.plan.mesh),
    }


def shards_json(placement: ArrayPlacement, leaf: Placement) -> list[dict[str, Any]]:
    """Returns the shards of an array: start and stop indices, and devices."""
    return [
        {"start": list(shard.start), "stop": list(shard.stop), "devices": list(shard.devices)}
        for shard in shards(leaf, placement.plan.mesh)
    ]


def _replicated(placement: ArrayPlacement) -> list[Placement]:
    """Returns the arrays of the state with several copies, the largest first; scalars are omitted."""
    leaves = [leaf for leaf in placement.plan.leaves if leaf.shape and copies(leaf, placement.plan.mesh) > 1]
    return sorted(leaves, key=lambda leaf: (-_redundant_bytes(leaf, placement), leaf.path))


def _redundant_bytes(leaf: Placement, placement: ArrayPlacement) -> int:
    """Returns the bytes per device that full sharding would save."""
    return leaf.local_bytes - leaf.local_bytes // copies(leaf, placement.plan.mesh)


def distinct_arrays(placement: ArrayPlacement) -> list[Placement]:
    """Returns parameters and batch; of repeated blocks with equal placement, the first."""
    distinct: dict[tuple[Any, ...], Placement] = {}
    for leaf in (*placement.plan.batch, *placement.plan.leaves):
        if leaf.kind in ("param", "batch"):
            distinct.setdefault((path_pattern(leaf.path), leaf.shape, leaf.spec), leaf)
    return list(distinct.values())


def _spec_text(spec: Sequence[Sequence[str]]) -> str:
    return "(" + ", ".join("+".join(axes) or "-" for axes in spec) + ")"
