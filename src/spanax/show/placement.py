"""Formats the axes of a program, and where the arrays of a plan or a run are placed, as text, JSON and drawings.

A drawing is a grid of the shards of an array, each with the devices that store it.
"""

import io
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich import box
from rich.console import CONSOLE_SVG_FORMAT, Console  # type: ignore[attr-defined]
from rich.table import Table
from rich.text import Text

from spanax.check.array_placement import ArrayPlacement, Shard, copies, shards
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import path_pattern
from spanax.plan.sharding.placement import DEVICE, Placement
from spanax.printable import printable
from spanax.show.tables import table_text
from spanax.trace.program import Program
from spanax.units import bytes_text
from spanax.usage import wants_colors

MAX_REPLICATED = 12
"""Number of replicated arrays that are listed."""

STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
"""Colors of shards in a drawing."""


def placement_text(placement: ArrayPlacement) -> str:
    """Returns the plan with its arrays, and those that are replicated."""
    lines = [f"as in the {placement.origin}: {placement.plan}"]
    return "\n".join([*lines, *_replicated_lines(placement)])


def _replicated_lines(placement: ArrayPlacement) -> list[str]:
    replicated = _replicated(placement)
    mesh = placement.plan.mesh
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
        "elsewhere": [],  # a checkpoint with a plan is saved as planned
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


def _replicated(placement: ArrayPlacement) -> list[Placement]:
    """Returns the arrays of the state with several copies, the largest first; scalars are omitted."""
    leaves = [leaf for leaf in placement.plan.leaves if leaf.shape and copies(leaf, placement.plan.mesh) > 1]
    return sorted(leaves, key=lambda leaf: (-_redundant_bytes(leaf, placement), leaf.path))


def _redundant_bytes(leaf: Placement, placement: ArrayPlacement) -> int:
    """Returns the bytes per device that full sharding would save."""
    return leaf.local_bytes - leaf.local_bytes // copies(leaf, placement.plan.mesh)


def distinct_arrays(placement: ArrayPlacement) -> list[Placement]:
    """Returns parameters and batch; of repeated blocks with equal placement, the first."""
    leaves = [leaf for leaf in (*placement.plan.batch, *placement.plan.leaves) if leaf.kind in ("param", "batch")]
    return [alike[0] for alike in repeated_arrays(leaves)]


def repeated_arrays(leaves: Sequence[Placement]) -> list[list[Placement]]:
    """Groups arrays that differ only in the index of their block."""
    groups: dict[tuple[Any, ...], list[Placement]] = {}
    for leaf in leaves:
        groups.setdefault((path_pattern(leaf.path), leaf.shape, leaf.spec), []).append(leaf)
    return list(groups.values())


def dims_text(leaf: Placement) -> str:
    """Returns the names and sizes of the dims of an array."""
    return " ".join(f"{name or '?'}:{size}" for name, size in zip(leaf.axes, leaf.shape, strict=True))


def spec_text(spec: Sequence[Sequence[str]]) -> str:
    """Returns the mesh axes of each dim.

    Example:
      >>> spec_text((("data", "fsdp"), ()))
      '(data+fsdp, -)'
    """
    return "(" + ", ".join("+".join(axes) or "-" for axes in spec) + ")"


@dataclass(frozen=True)
class Grid:
    """Shards of an array along at most two dims.

    Attributes:
      rows: the sharded dim drawn down, or None.
      columns: the sharded dim drawn across, or None.
      cells: the shard of each cell.
      left_out: other sharded dims, of which the first shard is drawn.
    """

    rows: int | None
    columns: int | None
    cells: tuple[tuple[Shard, ...], ...]
    left_out: tuple[int, ...]


def grid(leaf: Placement, mesh: MeshShape) -> Grid:
    """Returns the shards of an array as a grid: the first sharded dim down, the second across.

    Example:
      >>> leaf = Placement("w", (4, 6), "float32", "param", (None, None), (("data",), ("model",)), (2, 3), 24, "")
      >>> [[cell.devices for cell in row] for row in grid(leaf, MeshShape.of("data=2,model=2")).cells]
      [[(0,), (1,)], [(2,), (3,)]]
    """
    sharded = [dim for dim, axes in enumerate(leaf.spec) if mesh.ways(axes) > 1]
    # A single sharded dim is drawn across if it is the last one, as NumPy prints arrays.
    is_last = bool(sharded) and sharded[0] == len(leaf.shape) - 1
    columns = sharded[0] if is_last else None
    if len(sharded) > 1:
        columns = sharded[1]
    rows = sharded[0] if sharded and sharded[0] != columns else None
    left_out = tuple(dim for dim in sharded if dim not in (rows, columns))
    table: dict[int, dict[int, Shard]] = {}
    for shard in shards(leaf, mesh):
        if all(shard.start[dim] == 0 for dim in left_out):
            row, column = (0 if dim is None else shard.start[dim] for dim in (rows, columns))
            table.setdefault(row, {})[column] = shard
    return Grid(
        rows, columns, tuple(tuple(row[column] for column in sorted(row)) for _, row in sorted(table.items())), left_out
    )


def drawing_text(leaf: Placement, mesh: MeshShape) -> str:
    """Returns one array drawn on the mesh, in color on a terminal."""
    line, table = _drawn(leaf, mesh)
    console = _console(sys.stdout, [table])
    with console.capture() as captured:
        console.print(table)
    reason = f"\n{printable(leaf.reason)}" if leaf.reason else ""
    return f"{line}{reason}\n{captured.get().rstrip()}"


def drawing_svg(leaves: Sequence[Placement], mesh: MeshShape, title: str) -> str:
    """Returns the drawings of arrays as one SVG, which loads nothing."""
    drawings = [part for leaf in leaves for part in _drawn(leaf, mesh)]
    console = _console(io.StringIO(), drawings)
    for part in drawings:
        console.print(part)
    without_fonts = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=printable(title), code_format=without_fonts)


def _console(stream: TextIO, drawings: Sequence[Table | str]) -> Console:
    """Returns a console that is wide enough for drawings: a truncated grid is useless."""
    colors = "auto" if wants_colors(stream) else None
    console = Console(
        file=stream,
        record=True,
        highlight=False,
        markup=False,
        emoji=False,
        color_system=colors,  # type: ignore[arg-type]
    )
    console.width = max(console.width, *(console.measure(drawing).maximum for drawing in drawings))
    return console


def _drawn(leaf: Placement, mesh: MeshShape) -> tuple[str, Table]:
    """Returns a line that describes an array, and a table of its shards."""
    drawing = grid(leaf, mesh)
    table = Table(box=box.SQUARE, show_header=False, show_lines=True)
    for row in drawing.cells:
        styles = (STYLES[cell.devices[0] % len(STYLES)] for cell in row)
        texts = (devices_text(cell.devices) for cell in row)
        table.add_row(*(Text(text, style, justify="center") for text, style in zip(texts, styles, strict=True)))
    return printable(described(leaf, mesh, drawing)), table


def described(leaf: Placement, mesh: MeshShape, drawing: Grid) -> str:
    """Returns dims, mesh axes, bytes per device and copies of an array."""
    directions = {drawing.rows: " down", drawing.columns: " across"}
    dims = []
    for dim, (name, size, axes) in enumerate(zip(leaf.axes, leaf.shape, leaf.spec, strict=True)):
        direction = directions.get(dim, "")
        dims.append(f"{name or '?'}:{size}" + (f" / {'+'.join(axes)} {mesh.ways(axes)}{direction}" if axes else ""))
    times = copies(leaf, mesh)
    replication = f"{times} copies of each shard" if times > 1 else "one copy of each shard"
    note = f"; drawn: the first of dim {', '.join(map(str, drawing.left_out))}" if drawing.left_out else ""
    stored = f"{bytes_text(leaf.local_bytes)} per device" + ("" if leaf.memory_kind == DEVICE else " in host memory")
    return f"{leaf.path} {leaf.dtype}[{', '.join(dims)}]: {stored}, {replication}{note}"


def devices_text(devices: Sequence[int]) -> str:
    """Returns device numbers, ranges with a dash and strides with a colon.

    Example:
      >>> devices_text([0, 1, 2, 3]), devices_text([0, 2, 4, 6]), devices_text([1, 5]), devices_text([0, 1, 4, 5])
      ('0-3', '0-6:2', '1,5', '0,1,4,5')
    """
    steps = {after - before for before, after in zip(devices, devices[1:], strict=False)}
    if len(devices) > 2 and len(steps) == 1:
        (step,) = steps
        return f"{devices[0]}-{devices[-1]}" + (f":{step}" if step > 1 else "")
    if len(devices) > 8:
        return f"{','.join(map(str, devices[:4]))},... ({len(devices)})"
    return ",".join(map(str, devices))


def axes_json(program: Program) -> dict[str, Any]:
    """Returns axes and leaves as plain values; `ways` is the largest number of shards of an axis."""
    axes = program.step.axes
    return {
        "axes": [asdict(axis) for axis in program.axes],
        "leaves": [
            {
                "path": leaf.path,
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "kind": leaf.kind,
                "axes": list(leaf.axes),
            }
            for leaf in (*program.leaves, *program.batch)
        ],
        "parameters": program.num_params,
        "unknown": dict(axes.unknown),
        "opaque": dict(axes.opaque),
        "coverage": axes.coverage,
    }


def axes_text(program: Program) -> str:
    """Returns the axes as a table, with the coverage and unknown primitives below it."""
    columns = ("axis", "sizes", "ways", "classes", "arrays", "for example")
    rows = [
        (
            axis.name,
            ", ".join(map(str, axis.sizes)),
            f"{axis.ways}",
            f"{axis.num_classes}",
            f"{len(axis.leaves)}",
            axis.leaves[0],
        )
        for axis in program.axes
    ]
    axes = program.step.axes
    notes = [f"{100 * axes.coverage:.0f} % of the matmul and convolution FLOPs is sharded with the batch"]
    for name, count in axes.unknown.items():
        note = "its dims are not sharded; add one with spanax.rule"
        notes.append(f"no rule for primitive '{name}' ({count} times): {note}")
    for name, count in axes.opaque.items():
        notes.append(f"'{name}' ({count} times) cannot be traced into: its dims are not sharded")
    return table_text(columns, rows, width=120) + "\n" + "\n".join(notes)
