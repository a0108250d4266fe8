"""Formats the result of a search as text and JSON."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from spanax.plan.advice.remedies import remedies
from spanax.plan.advice.rules_of_thumb import rule
from spanax.plan.candidate import RESERVE, Candidate, Search, plan_of, shortfall
from spanax.plan.evaluate import collectives_of
from spanax.plan.plan import Placement
from spanax.show.tables import table_text
from spanax.units import bytes_text

FLOP_CONVENTION = "3 x the forward pass's matmul FLOPs, attention scores in full; hfu counts what is computed twice"


def candidate_json(search: Search, candidate: Candidate) -> dict[str, Any]:
    """Returns one candidate as plain values; bytes and seconds per device and step."""
    peak = search.cluster.num_devices * search.peak_flops * candidate.step_seconds
    return {
        "layout": candidate.layout,
        "mesh": dict(candidate.mesh.axes),
        "stages": candidate.num_stages,
        "schedule": candidate.schedule if candidate.num_stages > 1 else None,
        "chunks": candidate.num_chunks,
        "remat": candidate.remat,
        "microbatches": candidate.microbatches,
        "step_seconds": candidate.step_seconds,
        "examples_per_second": search.batch_size / candidate.step_seconds,
        "tokens_per_second": search.tokens_per_step / candidate.step_seconds if search.tokens_per_step else None,
        "seconds": candidate.seconds,
        "memory": candidate.memory | {"peak": candidate.peak_bytes},
        "mfu": search.model_flops / peak if peak else None,
        "hfu": candidate.flops * search.cluster.num_devices / peak if peak else None,
        "bottleneck": candidate.bottleneck,
    }


def search_json(search: Search, top: int) -> dict[str, Any]:
    """Returns the object of `spanax plan --json`."""
    best, setting = search.best, search.setting
    answer: dict[str, Any] = {"best": None}
    if best is not None:
        plan = plan_of(search, best)
        answer["best"] = candidate_json(search, best) | {
            "computed_axes": {axis: list(names) for axis, names in plan.layout.computed},
            "stored_axes": {
                "param": list(plan.layout.stored_params),
                "gradient": list(plan.layout.stored_gradients),
                "optimizer": list(plan.layout.stored_optimizer),
            },
            "collectives": collectives_of(search, best),
            "checkpoint_bytes": search.checkpoint_bytes,
            "restore_bytes": best.state_bytes,
            "rule": rule(search, best),
            "flop_convention": FLOP_CONVENTION,
        }
    else:
        answer["shortfall"] = shortfall(search)
        answer["nearest"] = [candidate_json(search, candidate) for candidate in search.nearest]
        answer["fits_with"] = remedies(search)
    return answer | {
        "cluster": str(search.cluster),
        "devices": search.cluster.num_devices,
        "batch": setting.batch_size,
        "sequence_lengths": list(setting.sequence_lengths),
        "dtypes": list(setting.dtypes),
        "usable_bytes": search.cluster.memory_bytes,
        "reserve": RESERVE,
        "candidates": [candidate_json(search, candidate) for candidate in search.candidates[:top]],
        "rejected": {str(reason): count for reason, count in search.rejected.items()},
        "compute_dtype": next(iter(search.programs.values())).compute_dtype,
        "loss_chunks": next(iter(search.programs.values())).loss_chunks,
        "attention": [str(choice) for choice in search.attention] or list(setting.attention),
        "layouts_priced": search.layouts_priced,
        "search_seconds": search.search_seconds,
        "trace_seconds": search.trace_seconds,
    }


def search_text(search: Search, data: dict[str, Any], top: int) -> str:
    """Returns the best layout with its reasons, the ranked table, and what was left out.

    Args:
      search: the search.
      data: the search as JSON.
      top: number of rows of the table.
    """
    lines = []
    best = search.best
    if best is None:
        lines.append(f"nothing fits on {search.cluster} ({search.setting}): {shortfall(search)}.")
        lines.append(f"it fits with {'; or with '.join(data['fits_with'])}")
    else:
        lines += _best_lines(search, best, data["best"])
    rows = search.candidates[:top] or search.nearest
    if rows:
        lines += ["", "ranked:" if best else "needs least:", _table(search, rows)]
    lines.append("")
    for reason, count in sorted(search.rejected.items(), key=lambda item: -item[1]):
        lines.append(f"left out {count}: {reason}")
    lines.append(
        f"{search.layouts_priced} layouts priced in {search.search_seconds:.2f} s, "
        f"after {search.trace_seconds:.2f} s of tracing"
    )
    return "\n".join(lines)


def _best_lines(search: Search, best: Candidate, data: dict[str, Any]) -> list[str]:
    limit = search.cluster.memory_bytes
    times = sorted(best.seconds.items(), key=lambda item: -item[1])
    memory = sorted(best.memory.items(), key=lambda item: -item[1])
    mfu = f", MFU {100 * data['mfu']:.1f} %, HFU {100 * data['hfu']:.1f} %" if data["mfu"] is not None else ""
    stages = f"; stages: {best.stages_text}" if best.stages_text else ""
    tokens, examples = data["tokens_per_second"], data["examples_per_second"]
    speed = f"{tokens:,.0f} tokens/s" if tokens else f"{examples:,.0f} examples/s"
    return [
        f"{best.layout} on {search.cluster} ({best.mesh}{stages}): {search.setting}, remat {best.remat}, "
        f"{best.microbatches} microbatch{'es' if best.microbatches > 1 else ''}",
        f"  step    {best.step_seconds:.4g} s, {speed}{mfu}; {best.bottleneck}",
        "          " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times if seconds > 0),
        f"  memory  {bytes_text(best.peak_bytes)} per device"
        + (f" of {bytes_text(limit)} usable, {100 * RESERVE:.0f} % reserved" if limit else ""),
        "          " + ", ".join(f"{name} {bytes_text(size)}" for name, size in memory if size > 0),
        "  moved   "
        + (
            ", ".join(
                f"{kind} over {axis} {bytes_text(size)}"
                for axis, kinds in data["collectives"].items()
                for kind, size in kinds.items()
            )
            or "nothing"
        ),
        f"  saved   {bytes_text(search.checkpoint_bytes)} per checkpoint; restoring it takes "
        f"{bytes_text(best.state_bytes)} per device",
        f"  rule    {data['rule']}",
        *(f"  attention {choice}" for choice in search.attention),
        f"  MFU is {FLOP_CONVENTION}" if mfu else "",
    ]


def _table(search: Search, rows: tuple[Candidate, ...]) -> str:
    table = Table("layout", "mesh", "stages", "remat", "micro", "step s", "MFU %", "memory", box=None, pad_edge=False)
    for candidate in rows:
        data = candidate_json(search, candidate)
        table.add_row(
            candidate.layout,
            str(candidate.mesh),
            candidate.stages_text,
            candidate.remat,
            str(candidate.microbatches),
            f"{candidate.step_seconds:.4g}",
            f"{100 * data['mfu']:.1f}" if data["mfu"] is not None else "",
            bytes_text(candidate.peak_bytes),
        )
    return table_text(table)


def array_lines(leaf: Placement, moved: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns the sharding of one array, its bytes, the reason, and its collectives by mesh axis, a line each."""
    lines = [
        f"{leaf.path} {leaf.dtype}{list(leaf.shape)} {leaf.axes}: {tuple(leaf.partition_spec)}",
        f"  {leaf.local_bytes} bytes per device; {leaf.reason or 'as the layout computes with it'}",
    ]
    sizes = [(kind, axes, size) for axes, kinds in moved.items() for kind, size in kinds.items() if size]
    return lines + ([f"  {kind} over {axes}: {bytes_text(size)} per step" for kind, axes, size in sizes] or [
        "  no collectives move it"
    ])  # fmt: skip
