"""`spanax compare` answered: measured next to predicted, best first, in text and as plain values."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from spanax.check.measure.compare import (
    PRUNED,
    Compared,
    Moved,
    Progress,
    check_pruning,
    compare,
    core_distance,
    distance,
    layouts,
    rank_correlation,
)
from spanax.commands.progress import Tell, remaining_text
from spanax.commands.requests import CompareCommand
from spanax.errors import SpanaxError
from spanax.hardware.cluster import cluster, local
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidate import Candidate, Search
from spanax.plan.evaluate import collectives_of
from spanax.show.search import candidate_json
from spanax.show.tables import table_text
from spanax.trace.rewrites.remat_policies import known_dtype
from spanax.trace.workload import Workload
from spanax.units import bytes_text

Data = dict[str, Any]

MEMORY_FROM = "XLA's memory analysis of the step compiled for the devices present"


def answer(
    load: Callable[..., Workload],
    asked: CompareCommand,
    devices: Sequence[Any],
    *,
    tell: Tell = lambda text, stays: None,
) -> tuple[str, Data]:
    """What `spanax compare` prints: as text, and as the object of --json.

    Args:
      load: makes the workload, given its sizes.
      asked: the flags.
      devices: what it runs on.
      tell: takes a line on how far it is, and whether the line stays on a terminal.

    Raises:
      SpanaxError: the request cannot be carried out.
    """
    _check(asked)
    mesh = None if asked.mesh is None else MeshShape.of(asked.mesh)
    here = local(devices) if asked.on is None else cluster(str(asked.on), len(devices))
    sizes = {"batch_size": asked.batch, "seq_len": asked.seq, "num_layers": asked.layers, "embed_dim": asked.embed}
    workload = load(**{name: size for name, size in sizes.items() if size is not None})
    rate, steps = workload.learning_rate, workload.num_steps
    program = workload.trace(learning_rate=rate, num_steps=steps, compute_dtype=asked.dtype)
    found = layouts(program, here, mesh=mesh, top=asked.top, every=asked.all)
    tell(_start_text(found), True)
    rows = compare(found, steps=asked.steps, devices=devices, tell=lambda now: tell(progress_text(now), False))
    return compared_text(found, rows), compared_json(found, rows) | {"workload": asked.workload, "steps": asked.steps}


def progress_text(now: Progress) -> str:
    """How far a comparison is, as a line.

    Example:
      >>> progress_text(Progress("compiled", 1, 9, "zero2 on fsdp=8", 39.7))
      'compiled 1 of 9, about 40 s remaining (zero2 on fsdp=8)'
      >>> progress_text(Progress("step", 10, 10, "", 0.0))
      'step 10 of 10'
    """
    last = f" ({now.layout})" if now.phase == "compiled" else ""
    left = f", {remaining_text(now.seconds_left)}" if now.seconds_left > 0 else ""
    return f"{now.phase} {now.done} of {now.total}{left}{last}"


def _start_text(found: Search) -> str:
    count, num_pruned = len(found.candidates), found.rejected.get(PRUNED, 0)
    more = f"; {num_pruned} more with --all" if num_pruned else ""
    return f"compiling {_layouts(count)} on {found.cluster}: {found.setting}{more}"


def compared_json(found: Search, rows: Sequence[Compared]) -> Data:
    """The rows as plain values: what `spanax plan --json` says of each, and `measured` beside it."""
    return {
        "cluster": str(found.cluster),
        "devices": found.cluster.num_devices,
        "batch": found.batch_size,
        "sequence_lengths": list(found.setting.sequence_lengths),
        "dtypes": list(found.setting.dtypes),
        "attention": list(found.setting.attention),
        "layouts_compared": len(rows),
        "layouts_left_out": found.rejected.get(PRUNED, 0),
        "best": _place(rows[0].candidate),
        "choice": _place(found.candidates[0]),
        "choice_ratio": distance(rows),
        "choice_core_ratio": core_distance(rows) if found.cluster.chip.shared else None,
        "rank_correlation": rank_correlation(rows),
        "memory_from": MEMORY_FROM,
        "rows": [
            candidate_json(found, row.candidate)
            | {
                "collectives": collectives_of(found, row.candidate),
                "state_bytes": row.state_bytes,
                "ratio": row.ratio,
                "measured": {
                    "step_seconds": row.step_seconds,
                    "seconds": list(row.seconds),
                    "core_seconds": list(row.core_seconds),
                    "state_bytes": row.compiled_state_bytes,
                    "peak_bytes": row.compiled_peak_bytes,
                    "collectives": {axes: dict(of) for axes, of in row.moved.items()},
                },
            }
            for row in rows
        ],
    }


def compared_text(found: Search, rows: Sequence[Compared]) -> str:
    """A row a layout, the fastest first: measured, then predicted."""
    choice = found.candidates[0]
    is_shared = found.cluster.chip.shared
    heads = ["layout", "mesh", "step s", "x best", *["core s"] * is_shared, "predicted s", "x best"]
    heads += ["peak", "predicted", "moved", "predicted"]
    table = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        one = row.candidate
        table.add_row(
            one.layout + (" *" if one is choice else ""),
            str(one.mesh),
            f"{row.step_seconds:.4g}",
            f"{row.ratio:.3f}",
            *[f"{row.step_core_seconds:.4g}"] * is_shared,
            f"{one.step_seconds:.4g}",
            f"{one.step_seconds / choice.step_seconds:.3f}",
            bytes_text(row.compiled_peak_bytes),
            bytes_text(one.peak_bytes),
            _total(row.moved),
            _total(collectives_of(found, one)),
        )
    best, num_pruned = rows[0].candidate, found.rejected.get(PRUNED, 0)
    by_cores = f"; by core seconds {core_distance(rows):.3f} times" if is_shared else ""
    return "\n".join(
        [
            f"{_layouts(len(rows))} on {found.cluster}: {found.setting}, remat {choice.remat}",
            "",
            table_text(table),
            "",
            f"the planner's choice (*), {choice.layout} on {choice.mesh}, takes {distance(rows):.3f} times as long as "
            f"the fastest, {best.layout} on {best.mesh}{by_cores}",
            _correlation_text(rank_correlation(rows), len(rows), num_pruned),
            *["core s: on all cores together, whoever else has the machine"] * is_shared,
            f"peak: {MEMORY_FROM}; moved: bytes of results a device and step",
        ]
    )


def _correlation_text(correlation: float | None, count: int, num_pruned: int) -> str:
    of = f"{count} of {count + num_pruned} layouts (--all compares all)" if num_pruned else _layouts(count)
    value = "none" if correlation is None else f"{correlation:.2f}"
    return f"rank correlation of the predicted and the measured order: {value}, over {of}"


def _layouts(count: int) -> str:
    return f"{count} layout{'s' if count > 1 else ''}"


def _check(asked: CompareCommand) -> None:
    known_dtype(asked.dtype)
    for name in ("steps", "top", "devices"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise SpanaxError(f"--{name} is {value}; it takes a whole number from 1.", fix=f"--{name} 1")
    check_pruning(asked.top, asked.all)


def _place(one: Candidate) -> Data:
    return {"layout": one.layout, "mesh": dict(one.mesh.axes), "remat": one.remat, "microbatches": one.microbatches}


def _total(moved: Moved) -> str:
    return bytes_text(sum(size for kinds in moved.values() for size in kinds.values()))
