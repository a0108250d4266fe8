"""Placement: every array of a plan in a list, beside the mesh that shows which device holds which part of it."""

import math
from collections.abc import Sequence

from spanax.check.array_placement import copies
from spanax.hardware.mesh import MeshShape
from spanax.plan.cost.prediction import Moved
from spanax.plan.plan import Placement, Plan, path_pattern
from spanax.show.page.parts.blocks import facts
from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.mesh import axis_colour, mesh_grid
from spanax.units import bytes_text

KINDS = {"param": "Parameters", "batch": "Batch", "optimizer": "Optimizer", "other": "Other state"}
"""The kinds of arrays in the order in which they are listed, and their titles."""

OPEN = ("param", "batch")
MOST = 4000
"""So many rows are listed, the largest of each kind; the rest is told of together."""


def placement(plan: Plan) -> Node:
    """The mesh, and the arrays by kind, equal ones of repeated blocks as one row."""
    listed = el("div", class_="arrays")
    largest = max((leaf.local_bytes for leaf in (*plan.leaves, *plan.batch)), default=1) or 1
    for kind, title in KINDS.items():
        rows = _rows([leaf for leaf in (*plan.leaves, *plan.batch) if leaf.kind == kind])
        if not rows:
            continue
        num_bytes = sum(leaf.local_bytes for alike in rows for leaf in alike)
        count = sum(map(len, rows))
        head = el(
            "summary", el("strong", title), f" {count:,} array{'s' * (count > 1)}, {bytes_text(num_bytes)} a device"
        )
        group = el("details", head, class_="kind", data_kind=kind, open="open" if kind in OPEN else None)
        for alike in rows[:MOST]:
            fill(group, _row(alike, plan, largest))
        if len(rows) > MOST:
            left = sum(leaf.local_bytes for alike in rows[MOST:] for leaf in alike)
            fill(group, el("p", f"and {len(rows) - MOST:,} smaller ones, {bytes_text(left)} a device", class_="note"))
        fill(listed, group)
    chosen = el("div", class_="chosen", aria_live="polite")
    stage = el("div", mesh_grid(plan.mesh), chosen, class_="stage")
    return el("div", stage, listed, class_="placement")


def dims(leaf: Placement, mesh: MeshShape) -> Node:
    """The dims of an array with their names and sizes, those that are split in the colour of their mesh axis."""
    found = el("span", class_="dims")
    for name, size, by in zip(leaf.axes, leaf.shape, leaf.spec, strict=True):
        way = f" / {'+'.join(by)} {mesh.ways(by)}" if by else ""
        tint = f"chip {axis_colour(mesh, by[0])}" if by else "chip"
        fill(found, el("span", f"{name or '?'} {size:,}{way}", class_=tint), " ")
    return fill(found, el("span", "one number", class_="chip")) if not leaf.shape else found


def array_facts(leaf: Placement, plan: Plan, alike: Sequence[Placement] = ()) -> Node:
    """All that is known of one array: its spec, its bytes, why it lies so, and what moves for it."""
    times = copies(leaf, plan.mesh)
    held = f"{leaf.local_bytes:,} bytes ({bytes_text(leaf.local_bytes)}), {list(leaf.local_shape)}"
    whole = leaf.item_bytes * math.prod(leaf.shape)
    parts = plan.mesh.size // times
    return facts(
        [
            ("spec", el("code", spec_text(leaf))),
            ("whole", f"{leaf.dtype}{list(leaf.shape)}, {bytes_text(whole)}"),
            ("a device", held),
            ("copies", _copies_text(parts, times)),
            ("why", leaf.reason or "as the layout computes with it"),
            ("moves", _moves(leaf, plan)),
            ("alike", f"{len(alike)} arrays, from {alike[0].path} to {alike[-1].path}" if len(alike) > 1 else None),
        ]
    )


def _copies_text(parts: int, times: int) -> str:
    if parts == 1:
        return f"whole on {times} devices" if times > 1 else "whole"
    return f"{parts} parts, {f'{times} copies of each' if times > 1 else 'each once'}"


def spec_text(leaf: Placement) -> str:
    """The spec as JAX writes it.

    Example:
      >>> leaf = Placement("w", (4, 6), "float32", "param", (None, None), ((), ("data", "fsdp")), (4, 3), 48, "")
      >>> spec_text(leaf)
      "P(None, ('data', 'fsdp'))"
    """
    inner = (repr(axes[0] if len(axes) == 1 else axes) if axes else "None" for axes in leaf.spec)
    return f"P({', '.join(inner)})"


def moved_text(moved: Moved) -> str:
    """What moves, in words, the most first."""
    rows = sorted(((size, kind, axes) for axes, kinds in moved.items() for kind, size in kinds.items()), reverse=True)
    return "; ".join(f"{kind} over {axes} {bytes_text(size)} a step" for size, kind, axes in rows if size)


def _rows(leaves: Sequence[Placement]) -> list[list[Placement]]:
    """Arrays that are alike but for the number of their block, together; the largest first."""
    groups: dict[tuple[object, ...], list[Placement]] = {}
    for leaf in leaves:
        groups.setdefault((path_pattern(leaf.path), leaf.shape, leaf.dtype, leaf.spec, leaf.reason), []).append(leaf)
    return sorted(groups.values(), key=lambda alike: -len(alike) * alike[0].local_bytes)


def _row(alike: Sequence[Placement], plan: Plan, largest: int) -> Node:
    leaf, index = alike[0], {name: at for at, name in enumerate(name for name, size in plan.mesh.axes if size > 1)}
    by_dim = "|".join("+".join(str(index[axis]) for axis in by if axis in index) for by in leaf.spec)
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
    """What moves of an array in a step; of one of equal blocks, the first of them."""
    if leaf.kind == "batch":
        return "each device reads its own rows"
    if leaf.kind != "param":
        return "with the parameter that it belongs to" if leaf.kind == "optimizer" else ""
    if plan.price is None:
        return "not known: the plan has no price"
    found = plan.price.moved_of.get(leaf.path)
    return "not counted, it is too small" if found is None else moved_text(found) or "nothing"
