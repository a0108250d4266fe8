"""Formats the axes of a program as text and JSON."""

from dataclasses import asdict
from typing import Any

from spanax.show.tables import table_text
from spanax.trace.program import Program


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
