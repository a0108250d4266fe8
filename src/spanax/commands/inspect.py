"""`spanax inspect` answered: what lies where, drawn, and the program with its shardings written out."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spanax.check.array_placement import ArrayPlacement, array_placement, copies, shards
from spanax.check.compilers.annotated_step import annotated_program, program_for
from spanax.commands.requests import InspectCommand
from spanax.errors import SpanaxError, WriteError
from spanax.plan.pipeline.ticks import Ticks, ticks_of
from spanax.plan.plan import Placement
from spanax.printable import printable, printable_lines
from spanax.show.drawing import devices_text, drawn, svg
from spanax.show.schedules import ticks_json, ticks_text
from spanax.show.tables import table_text
from spanax.trace.workload import Workload
from spanax.units import bytes_text
from spanax.usage import wants_colours

Data = dict[str, Any]

MOST = 12
"""How many arrays are listed as copied."""


def answer(
    asked: InspectCommand, load: Callable[..., Workload], devices: Callable[[int], list[Any]]
) -> tuple[str, Data]:
    """What `spanax inspect` prints: as text, and as the object of --json; and the files it was asked to write.

    Args:
      asked: the flags.
      load: makes a workload, given its name and sizes; for --hlo only.
      devices: brings up so many devices, for --hlo only; nothing else touches one.

    Raises:
      SpanaxError: the request cannot be carried out; also DataError and WriteError.
    """
    found = array_placement(asked.path)
    chosen = [found.plan[asked.leaf]] if asked.leaf is not None else _one_of_each(found)
    text, data = printable_lines(_summary(found)), _json(found)
    if asked.leaf is not None:
        text = _drawing(found, chosen[0])
        data["leaf"] = _leaf_json(found, chosen[0], with_shards=True)
    if asked.schedule:
        table = _ticks(found)
        text, data["schedule"] = ticks_text(table), ticks_json(table)
    wrote = []
    if asked.svg is not None:
        _write(asked.svg, svg(chosen, found.plan.mesh, f"{found.plan.layout.name} on {found.plan.mesh}"))
        wrote.append(f"written to {asked.svg}: {len(chosen)} arrays drawn")
    if asked.hlo is not None:
        there = devices(found.plan.mesh.size)  # before the workload: its own file may start JAX with fewer
        program = program_for(asked.path, found.plan, load, asked.workload)
        _write(asked.hlo, annotated_program(program, found.plan, there))
        wrote.append(f"written to {asked.hlo}: the step with its shardings, before XLA")
    return "\n".join([text, *wrote]), data


def _ticks(found: ArrayPlacement) -> Ticks:
    schedule = found.plan.schedule
    if schedule.num_stages == 1:
        raise SpanaxError(
            "the plan has no pipeline whose schedule could be drawn.",
            where=f"mesh {found.plan.mesh}",
            fix="a plan with 'pipe' in its mesh: spanax train --mesh pipe=2,data=4",
        )
    return ticks_of(schedule)


def _summary(found: ArrayPlacement) -> str:
    plan, mesh = found.plan, found.plan.mesh
    held = ", ".join(f"{kind} {bytes_text(plan.state_bytes(kind))}" for kind in ("param", "optimizer", "other"))
    lines = [
        f"{plan.layout.name} on {mesh.size} devices ({mesh}), as in the {found.origin}",
        f"each device holds {held} = {bytes_text(plan.state_bytes())}",
    ]
    for path, wished, real in found.elsewhere:
        lines.append(f"ELSEWHERE {path}: planned {_spec_text(wished)}, saved {_spec_text(real)}")
    whole = _copied(found)
    spare = sum(_spare_bytes(leaf, found) for leaf in whole)
    if whole:
        lines.append(f"{len(whole)} arrays lie on several devices, {bytes_text(spare)} a device more than once:")
    for leaf in whole[:MOST]:
        reason = f"; {leaf.reason}" if leaf.reason else ""
        lines.append(f"  {leaf.path} {copies(leaf, mesh)} times, {bytes_text(leaf.local_bytes)} a device{reason}")
    if len(whole) > MOST:
        lines.append(f"  and {len(whole) - MOST} smaller ones")
    table = Table("array", "shape", "split", "parts", "copies", "a device", "devices of the first part", box=None,
                  pad_edge=False)  # fmt: skip
    for leaf in _one_of_each(found):
        parts = shards(leaf, mesh)
        shape = " ".join(f"{name or '?'}:{size}" for name, size in zip(leaf.axes, leaf.shape, strict=True))
        table.add_row(
            leaf.path, shape, _spec_text(leaf.spec), str(len(parts)), str(copies(leaf, mesh)),
            bytes_text(leaf.local_bytes), devices_text(parts[0].devices),
        )  # fmt: skip
    return "\n".join([*lines, "", table_text(table)])


def _drawing(found: ArrayPlacement, leaf: Placement) -> str:
    line, table = drawn(leaf, found.plan.mesh)
    colours = "auto" if wants_colours(sys.stdout) else None
    console = Console(highlight=False, markup=False, emoji=False, color_system=colours)  # type: ignore[arg-type]
    console.width = max(console.width, console.measure(table).maximum)  # a grid that is cut off shows nothing
    with console.capture() as captured:
        console.print(table)
    reason = f"\n{printable(leaf.reason)}" if leaf.reason else ""
    return f"{printable(line)}{reason}\n{captured.get().rstrip()}"


def _json(found: ArrayPlacement) -> Data:
    plan = found.plan
    return {
        "from": found.origin,
        "layout": plan.layout.name,
        "mesh": dict(plan.mesh.axes),
        "bytes_per_device": {kind: plan.state_bytes(kind) for kind in ("param", "optimizer", "other")},
        "elsewhere": [{"path": path, "planned": wished, "saved": real} for path, wished, real in found.elsewhere],
        "copied": [
            {"path": leaf.path, "copies": copies(leaf, plan.mesh), "bytes": leaf.local_bytes} for leaf in _copied(found)
        ],
        "leaves": [_leaf_json(found, leaf, with_shards=False) for leaf in plan.leaves + plan.batch],
    }


def _leaf_json(found: ArrayPlacement, leaf: Placement, *, with_shards: bool) -> Data:
    data: Data = {
        "path": leaf.path,
        "kind": leaf.kind,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "axes": list(leaf.axes),
        "spec": [list(by) for by in leaf.spec],
        "bytes": leaf.local_bytes,
        "copies": copies(leaf, found.plan.mesh),
    }
    if with_shards:
        data["shards"] = [
            {"start": list(one.start), "stop": list(one.stop), "devices": list(one.devices)}
            for one in shards(leaf, found.plan.mesh)
        ]
    return data


def _copied(found: ArrayPlacement) -> list[Placement]:
    """Arrays of the state that lie on several devices, the largest first; single numbers are not worth a line."""
    whole = [leaf for leaf in found.plan.leaves if leaf.shape and copies(leaf, found.plan.mesh) > 1]
    return sorted(whole, key=lambda leaf: (-_spare_bytes(leaf, found), leaf.path))


def _spare_bytes(leaf: Placement, found: ArrayPlacement) -> int:
    """What a device would not hold if no two held the same."""
    return leaf.local_bytes - leaf.local_bytes // copies(leaf, found.plan.mesh)


def _one_of_each(found: ArrayPlacement) -> list[Placement]:
    """Parameters and batch; of repeated blocks the first, where the others lie alike."""
    seen: dict[tuple[Any, ...], Placement] = {}
    for leaf in (*found.plan.batch, *found.plan.leaves):
        if leaf.kind in ("param", "batch"):
            pattern = re.sub(r"\.\d+\b", ".*", leaf.path)
            seen.setdefault((pattern, leaf.shape, leaf.spec), leaf)
    return list(seen.values())


def _spec_text(spec: Sequence[Sequence[str]]) -> str:
    return "(" + ", ".join("+".join(by) or "-" for by in spec) + ")"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise WriteError(f"cannot write '{path}'.", where=str(error)) from None
