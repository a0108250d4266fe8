"""Lists every array of a plan, next to the mesh that shows which device holds which shard."""

import math
from collections.abc import Sequence

from spanax.check.array_placement import copies
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Plan, path_pattern
from spanax.plan.prediction import Moved
from spanax.plan.sharding.placement import Placement
from spanax.show.page.parts.blocks import facts
from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.mesh import axis_colour, mesh_grid
from spanax.units import bytes_text

KINDS = {"param": "Parameters", "batch": "Batch", "optimizer": "Optimizer", "other": "Other state"}
"""Kinds of arrays in the order of the list, and their titles."""

OPEN = ("param", "batch")
MAX_ROWS = 4000
"""Number of rows per kind, the largest arrays; the others are summed up in one line."""


def placement(plan: Plan) -> Node:
    """Returns the mesh, and the arrays by kind; equal arrays of repeated blocks share a row."""
    listed = el("div", class_="arrays")
    largest = max((leaf.local_bytes for leaf in (*plan.leaves, *plan.batch)), default=1) or 1
    for kind, title in KINDS.items():
        rows = _rows([leaf for leaf in (*plan.leaves, *plan.batch) if leaf.kind == kind])
        if not rows:
            continue
        num_bytes = sum(leaf.local_bytes for alike in rows for leaf in alike)
        count = sum(map(len, rows))
        head = el(
            "summary", el("strong", title), f" {count:,} array{'s' * (count > 1)}, {bytes_text(num_bytes)} per device"
        )
        group = el("details", head, class_="kind", data_kind=kind, open="open" if kind in OPEN else None)
        for alike in rows[:MAX_ROWS]:
            fill(group, _row(alike, plan, largest))
        if len(rows) > MAX_ROWS:
            omitted = sum(leaf.local_bytes for alike in rows[MAX_ROWS:] for leaf in alike)
            fill(
                group,
                el("p", f"and {len(rows) - MAX_ROWS:,} smaller ones, {bytes_text(omitted)} per device", class_="note"),
            )
        fill(listed, group)
    chosen = el("div", class_="chosen", aria_live="polite")
    stage = el("div", mesh_grid(plan.mesh), chosen, class_="stage")
    return el("div", stage, listed, class_="placement")


def dims(leaf: Placement, mesh: MeshShape) -> Node:
    """Returns the dims of an array with names and sizes; sharded dims in the color of their mesh axis."""
    listed = el("span", class_="dims")
    for name, size, axes in zip(leaf.axes, leaf.shape, leaf.spec, strict=True):
        sharding = f" / {'+'.join(axes)} {mesh.ways(axes)}" if axes else ""
        tint = f"chip {axis_colour(mesh, axes[0])}" if axes else "chip"
        fill(listed, el("span", f"{name or '?'} {size:,}{sharding}", class_=tint), " ")
    return fill(listed, el("span", "scalar", class_="chip")) if not leaf.shape else listed


def array_facts(leaf: Placement, plan: Plan, alike: Sequence[Placement] = ()) -> Node:
    """Returns the spec of one array, its bytes, the reason for its placement, and its collectives."""
    times = copies(leaf, plan.mesh)
    local = f"{leaf.local_bytes:,} bytes ({bytes_text(leaf.local_bytes)}), {list(leaf.local_shape)}"
    num_bytes = leaf.item_bytes * math.prod(leaf.shape)
    parts = plan.mesh.size // times
    return facts(
        [
            ("spec", el("code", spec_text(leaf))),
            ("array", f"{leaf.dtype}{list(leaf.shape)}, {bytes_text(num_bytes)}"),
            ("per device", local),
            ("copies", _copies_text(parts, times)),
            ("reason", leaf.reason or "sharded as it is used"),
            ("communication", _moves(leaf, plan)),
            (
                "applies to",
                f"{len(alike)} arrays, from {alike[0].path} to {alike[-1].path}" if len(alike) > 1 else None,
            ),
        ]
    )


def _copies_text(parts: int, times: int) -> str:
    if parts == 1:
        return f"replicated on {times} devices" if times > 1 else "one device"
    return f"{parts} shards, {f'{times} copies' if times > 1 else 'one copy'} of each"


def spec_text(leaf: Placement) -> str:
    """Returns the spec as JAX prints it.

    Example:
      >>> leaf = Placement("w", (4, 6), "float32", "param", (None, None), ((), ("data", "fsdp")), (4, 3), 48, "")
      >>> spec_text(leaf)
      "P(None, ('data', 'fsdp'))"
    """
    inner = (repr(axes[0] if len(axes) == 1 else axes) if axes else "None" for axes in leaf.spec)
    return f"P({', '.join(inner)})"


def moved_text(moved: Moved) -> str:
    """Returns collectives and their bytes as text, the largest first."""
    rows = sorted(((size, kind, axes) for axes, kinds in moved.items() for kind, size in kinds.items()), reverse=True)
    return "; ".join(f"{kind} over {axes} {bytes_text(size)} per step" for size, kind, axes in rows if size)


def _rows(leaves: Sequence[Placement]) -> list[list[Placement]]:
    """Groups arrays that differ only in the index of their block; the largest first."""
    groups: dict[tuple[object, ...], list[Placement]] = {}
    for leaf in leaves:
        groups.setdefault((path_pattern(leaf.path), leaf.shape, leaf.dtype, leaf.spec, leaf.reason), []).append(leaf)
    return sorted(groups.values(), key=lambda alike: -len(alike) * alike[0].local_bytes)


def _row(alike: Sequence[Placement], plan: Plan, largest: int) -> Node:
    leaf, names = alike[0], [name for name, size in plan.mesh.axes if size > 1]
    index = {name: number for number, name in enumerate(names)}
    by_dim = "|".join("+".join(str(index[axis]) for axis in axes if axis in index) for axes in leaf.spec)
    name = leaf.path if len(alike) == 1 else f"{path_pattern(leaf.path)} ×{len(alike)}"
    meter = el("span", class_="meter", style=f"--part:{100 * leaf.local_bytes / largest:.1f}%")
    head = el(
        "summary",
        el("code", name),
        dims(leaf, plan.mesh),
        el("span", bytes_text(leaf.local_bytes), meter, class_="size"),
    )
    return el("details", head, array_facts(leaf, plan, alike), class_="array", data_by=by_dim)


def _moves(leaf: Placement, plan: Plan) -> str:
    """Returns the collectives of an array per step; for equal blocks, those of the first."""
    if leaf.kind == "batch":
        return "none: each device reads its rows"
    if leaf.kind != "param":
        return "see its parameter" if leaf.kind == "optimizer" else ""
    if plan.price is None:
        return "unknown: the plan has no predicted cost"
    moved = plan.price.moved_of.get(leaf.path)
    return "negligible" if moved is None else moved_text(moved) or "none"
