"""A search as text and as JSON."""

from typing import Any

from rich.table import Table

from spanax.plan.advice.remedies import remedies
from spanax.plan.advice.rules_of_thumb import rule
from spanax.plan.candidate import RESERVE, Candidate, Search, plan_of, shortfall
from spanax.plan.evaluate import collectives_of
from spanax.show.tables import table_text
from spanax.units import bytes_text

FLOP_CONVENTION = "3 x the forward pass's matmul FLOPs, attention scores in full; hfu counts what is computed twice"


def candidate_json(found: Search, one: Candidate) -> dict[str, Any]:
    """One candidate as plain values; bytes and seconds of one device and one step."""
    peak = found.cluster.num_devices * found.peak_flops * one.step_seconds
    return {
        "layout": one.layout,
        "mesh": dict(one.mesh.axes),
        "stages": one.num_stages,
        "schedule": one.schedule if one.num_stages > 1 else None,
        "chunks": one.num_chunks,
        "remat": one.remat,
        "microbatches": one.microbatches,
        "step_seconds": one.step_seconds,
        "examples_per_second": found.batch_size / one.step_seconds,
        "tokens_per_second": found.tokens_per_step / one.step_seconds if found.tokens_per_step else None,
        "seconds": one.seconds,
        "memory": one.memory | {"peak": one.peak_bytes},
        "mfu": found.model_flops / peak if peak else None,
        "hfu": one.flops * found.cluster.num_devices / peak if peak else None,
        "bottleneck": one.bottleneck,
    }


def search_json(found: Search, top: int) -> dict[str, Any]:
    """The contract of `spanax plan --json`."""
    best, setting = found.best, found.setting
    answer: dict[str, Any] = {"best": None}
    if best is not None:
        made = plan_of(found, best)
        answer["best"] = candidate_json(found, best) | {
            "computed_axes": {axis: list(names) for axis, names in made.layout.computed},
            "stored_axes": {
                "param": list(made.layout.stored_params),
                "gradient": list(made.layout.stored_gradients),
                "optimizer": list(made.layout.stored_optimizer),
            },
            "collectives": collectives_of(found, best),
            "checkpoint_bytes": found.checkpoint_bytes,
            "restore_bytes": best.state_bytes,
            "rule": rule(found, best),
            "flop_convention": FLOP_CONVENTION,
        }
    else:
        answer["shortfall"] = shortfall(found)
        answer["nearest"] = [candidate_json(found, one) for one in found.nearest]
        answer["fits_with"] = remedies(found)
    return answer | {
        "cluster": str(found.cluster),
        "devices": found.cluster.num_devices,
        "batch": setting.batch_size,
        "sequence_lengths": list(setting.sequence_lengths),
        "dtypes": list(setting.dtypes),
        "usable_bytes": found.cluster.memory_bytes,
        "reserve": RESERVE,
        "candidates": [candidate_json(found, one) for one in found.candidates[:top]],
        "rejected": {str(reason): count for reason, count in found.rejected.items()},
        "compute_dtype": next(iter(found.programs.values())).compute_dtype,
        "loss_chunks": next(iter(found.programs.values())).loss_chunks,
        "attention": [str(each) for each in found.attention] or list(setting.attention),
        "layouts_priced": found.layouts_priced,
        "search_seconds": found.search_seconds,
        "trace_seconds": found.trace_seconds,
    }


def search_text(found: Search, said: dict[str, Any], top: int) -> str:
    """The best layout with its reasons, the ranked table, and what was left out; `said` is the search as JSON."""
    lines = []
    best = found.best
    if best is None:
        lines.append(f"nothing fits on {found.cluster} ({found.setting}): {shortfall(found)}.")
        lines.append(f"it fits with {'; or with '.join(said['fits_with'])}")
    else:
        lines += _best_lines(found, best, said["best"])
    rows = found.candidates[:top] or found.nearest
    if rows:
        lines += ["", "ranked:" if best else "needs least:", _table(found, rows)]
    lines.append("")
    for reason, count in sorted(found.rejected.items(), key=lambda item: -item[1]):
        lines.append(f"left out {count}: {reason}")
    lines.append(
        f"{found.layouts_priced} layouts priced in {found.search_seconds:.2f} s, "
        f"after {found.trace_seconds:.2f} s of tracing"
    )
    return "\n".join(lines)


def _best_lines(found: Search, best: Candidate, said: dict[str, Any]) -> list[str]:
    limit = found.cluster.memory_bytes
    spent = sorted(best.seconds.items(), key=lambda item: -item[1])
    held = sorted(best.memory.items(), key=lambda item: -item[1])
    mfu = f", MFU {100 * said['mfu']:.1f} %, HFU {100 * said['hfu']:.1f} %" if said["mfu"] is not None else ""
    stages = f"; stages: {best.stages_text}" if best.stages_text else ""
    tokens, examples = said["tokens_per_second"], said["examples_per_second"]
    speed = f"{tokens:,.0f} tokens/s" if tokens else f"{examples:,.0f} examples/s"
    return [
        f"{best.layout} on {found.cluster} ({best.mesh}{stages}): {found.setting}, remat {best.remat}, "
        f"{best.microbatches} microbatch{'es' if best.microbatches > 1 else ''}",
        f"  step    {best.step_seconds:.4g} s, {speed}{mfu}; {best.bottleneck}",
        "          " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in spent if seconds > 0),
        f"  memory  {bytes_text(best.peak_bytes)} a device"
        + (f" of {bytes_text(limit)} usable, {100 * RESERVE:.0f} % kept free" if limit else ""),
        "          " + ", ".join(f"{name} {bytes_text(size)}" for name, size in held if size > 0),
        "  moved   "
        + (
            ", ".join(
                f"{kind} over {axis} {bytes_text(size)}"
                for axis, kinds in said["collectives"].items()
                for kind, size in kinds.items()
            )
            or "nothing"
        ),
        f"  saved   {bytes_text(found.checkpoint_bytes)} a checkpoint; to restore one takes "
        f"{bytes_text(best.state_bytes)} a device",
        f"  rule    {said['rule']}",
        *(f"  attention {one}" for one in found.attention),
        f"  MFU is {FLOP_CONVENTION}" if mfu else "",
    ]


def _table(found: Search, rows: tuple[Candidate, ...]) -> str:
    table = Table("layout", "mesh", "stages", "remat", "micro", "step s", "MFU %", "memory", box=None, pad_edge=False)
    for one in rows:
        said = candidate_json(found, one)
        table.add_row(
            one.layout,
            str(one.mesh),
            one.stages_text,
            one.remat,
            str(one.microbatches),
            f"{one.step_seconds:.4g}",
            f"{100 * said['mfu']:.1f}" if said["mfu"] is not None else "",
            bytes_text(one.peak_bytes),
        )
    return table_text(table)
