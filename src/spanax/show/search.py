"""Formats the result of a search as text and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from spanax.plan.advice.summary import Best, Summary
from spanax.plan.candidate import Candidate, Rates, Search
from spanax.plan.candidates.loss_chunks import saved_bytes, suiting_chunks
from spanax.plan.defaults import ASSIGNMENT_MARGIN, RATIO_ERROR, REPEATED_MARGIN, STAGE_MARGIN
from spanax.plan.evaluate import evaluated
from spanax.plan.plan import Plan
from spanax.plan.reason import Reason
from spanax.plan.sharding.placement import DEVICE, Placement
from spanax.processes.gpu_memory import setting_text
from spanax.show.tables import table_text
from spanax.trace.jaxpr.remat_policies import ON_HOST
from spanax.trace.program import Program
from spanax.units import bytes_text, quantity_text

FROZEN = ", 2 x of frozen weights"
MFU_CONVENTION = "3 x the forward pass's matmul FLOPs, attention scores in full"

ALL_EXPERTS = "; it counts unchosen experts: no top-k over the experts' weights shows which of them a token uses"


LAYOUT_HEADS = ("layout", "mesh", "stages", "remat", "micro", "step s", "MFU %", "memory")
"""Columns of a table of candidates."""


def layout_json(candidate: Candidate) -> dict[str, Any]:
    """Returns what identifies a candidate, as plain values."""
    return {
        "layout": candidate.layout,
        "mesh": dict(candidate.whole_mesh.axes),
        "remat": candidate.remat,
        "microbatches": candidate.microbatches,
    }


def candidate_json(search: Search, candidate: Candidate) -> dict[str, Any]:
    """Returns one candidate as plain values; bytes and seconds per device and step."""
    rates = search.rates(candidate)
    return layout_json(candidate) | {
        "stages": candidate.num_stages,
        "schedule": candidate.schedule if candidate.num_stages > 1 else None,
        "chunks": candidate.num_chunks,
        "step_seconds": candidate.step_seconds,
        "examples_per_second": rates.examples_per_second,
        "tokens_per_second": rates.tokens_per_second,
        "seconds": candidate.seconds,
        "hidden": candidate.hidden,
        "memory": candidate.memory | {"peak": candidate.peak_bytes},
        "host_bytes": candidate.host_bytes,
        "offload": list(search.offload),
        "padded": dict(search.programs[candidate.remat].options.padded),
        "upper_bytes": candidate.upper_bytes,
        "mfu": rates.mfu,
        "bottleneck": candidate.bottleneck,
    }


def search_json(summary: Summary, top: int) -> dict[str, Any]:
    """Returns the object of `spanax plan --json`."""
    search = summary.search
    setting = summary.search.setting
    program = next(iter(search.programs.values()))
    return _best_json(summary) | {
        "cluster": str(search.cluster),
        "devices": search.cluster.num_devices,
        "batch": setting.batch_size,
        "sequence_lengths": list(setting.sequence_lengths),
        "dtypes": list(setting.dtypes),
        "usable_bytes": search.cluster.memory_bytes,
        "reserve": summary.reserve,
        "memory_margin": {"share": 1 / (1 - summary.reserve) - 1},
        "candidates": [candidate_json(search, candidate) for candidate in search.candidates[:top]],
        "rejected": {str(reason): count for reason, count in search.rejected.items()},
        "compute_dtype": program.compute_dtype,
        "quantize": program.options.quantize,
        "quantized": list(program.quantized),
        "loss_chunks": program.loss_chunks,
        "attention": [str(choice) for choice in search.attention] or list(setting.attention),
        "layouts_priced": search.layouts_priced,
        "search_seconds": search.search_seconds,
        "trace_seconds": search.trace_seconds,
    }


def _best_json(summary: Summary) -> dict[str, Any]:
    """Returns the best candidate with its layout, or what would make one fit."""
    search = summary.search
    best = summary.best
    if best is None or search.best is None:
        return {
            "best": None,
            "shortfall": summary.shortfall,
            "nearest": [candidate_json(search, candidate) for candidate in search.nearest],
            "fits_with": list(summary.remedies),
        }
    layout = best.plan.layout
    return {
        "best": candidate_json(search, search.best)
        | {
            "runner_up": None if search.runner_up is None else layout_json(search.runner_up),
            "computed_axes": {axis: list(names) for axis, names in layout.computed},
            "stored_axes": {
                "param": list(layout.stored_params),
                "gradient": list(layout.stored_gradients),
                "optimizer": list(layout.stored_optimizer),
            },
            "collectives": best.collectives,
            "checkpoint_bytes": search.checkpoint_bytes,
            "restore_bytes": search.best.state_bytes,
            "rule": best.rule,
            "why": [str(reason) for reason in _reasons(search)],
            "flop_convention": MFU_CONVENTION,
            "flop_dtype": search.dtype,
            "counts_all_experts": search.counts_all_experts,
            "environment": search.cluster.memory_setting(search.best.upper_bytes),
        }
    }


def search_text(summary: Summary, top: int) -> str:
    """Returns the best layout with its reasons, a table of the `top` fastest, and the rejected layouts by reason."""
    search = summary.search
    if summary.best is None or search.best is None:
        lines = [
            f"nothing fits on {search.cluster} ({search.setting}): {summary.shortfall}.",
            f"it fits with {'; or with '.join(summary.remedies)}",
        ]
    else:
        lines = _best_lines(summary, search.best, summary.best)
    rows = search.candidates[:top] or search.nearest
    if rows:
        lines += [
            "",
            ranked_text(rows) if search.best else "needs least:",
            table_text(LAYOUT_HEADS, [layout_cells(search, row) for row in rows]),
        ]
    if search.runner_up is not None:
        lines += ["", _runner_up(search.candidates[0], search.runner_up)]
    rejected = sorted(search.rejected.items(), key=lambda item: -item[1])
    lines += ["", *(f"left out {count}: {reason}" for reason, count in rejected)]
    lines.append(
        f"{search.layouts_priced} layouts priced in {search.search_seconds:.2f} s, "
        f"after {search.trace_seconds:.2f} s of tracing"
    )
    return "\n".join(lines)


def _runner_up(best: Candidate, second: Candidate) -> str:
    """Returns how little the second layout differs from the best."""
    difference = second.step_seconds / best.step_seconds - 1
    error = f"the median error between two layouts is {100 * RATIO_ERROR:.0f} %"
    return f"{second.layout} ({second.whole_mesh}) may be as fast: {100 * difference:+.1f} %, and {error}"


def ranked_text(rows: Sequence[Candidate]) -> str:
    """Returns by what candidates are ranked: their step time, and a handicap where a faster one comes later."""
    handicaps = [
        f"{name} as if {100 * margin:.0f} % slower"
        for name, margin, is_listed in (
            ("assignments in parentheses", ASSIGNMENT_MARGIN, any(row.assigned for row in rows)),
            ("stages", STAGE_MARGIN, any(row.num_stages > 1 for row in rows)),
            ("layouts that repeat most FLOPs", REPEATED_MARGIN, any(row.repeats_most for row in rows)),
        )
        if is_listed and any(after.step_seconds < before.step_seconds for before, after in pairwise(rows))
    ]
    return f"ranked by step time{''.join(f'; {handicap}' for handicap in handicaps)}:"


def _best_lines(summary: Summary, candidate: Candidate, best: Best) -> list[str]:
    search = summary.search
    rates = summary.search.rates(candidate)
    limit = search.cluster.memory_bytes
    times = sorted(candidate.seconds.items(), key=lambda item: -item[1])
    hidden = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in candidate.hidden.items() if seconds > 0)
    memory = sorted(candidate.memory.items(), key=lambda item: -item[1])
    moved = bytes_by_collective(best.collectives)
    mfu = "" if rates.mfu is None else f", MFU {100 * rates.mfu:.1f} %"
    frozen = FROZEN if next(iter(search.programs.values())).frozen else ""
    convention = MFU_CONVENTION + frozen + (ALL_EXPERTS if search.counts_all_experts else "")
    peak = quantity_text(search.peak_flops, "operations per second", digits=3)
    needed = search.cluster.memory_setting(candidate.upper_bytes)
    return [
        f"{candidate.layout} on {search.cluster} ({candidate.whole_mesh}): {search.setting}, {best.plan.schedule}"
        + "".join(f", {option}" for option in _options(search, candidate)),
        *(f"  why     {reason}" for reason in _reasons(search)),
        f"  step    {candidate.step_seconds:.4g} s, {_rate_text(rates)}{mfu}; {candidate.bottleneck}",
        "          " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times if seconds > 0),
        *([f"          hidden: {hidden}"] if hidden else []),
        f"  memory  {bytes_text(candidate.peak_bytes)} per device"
        + (f", at most {bytes_text(candidate.upper_bytes)} of {bytes_text(limit)} usable" if limit else "")
        + (f"; {bytes_text(candidate.host_bytes)} of host memory per device" if candidate.host_bytes else ""),
        "          " + ", ".join(f"{name} {bytes_text(size)}" for name, size in memory if size > 0),
        *([f"          {setting_text(needed, is_set=False)}"] if needed else []),
        "  moved   " + (", ".join(f"{name} {bytes_text(size)}" for name, size in moved.items()) or "nothing"),
        f"  saved   {bytes_text(search.checkpoint_bytes)} per checkpoint; restoring it takes "
        f"{bytes_text(candidate.state_bytes)} per device",
        f"  rule    {best.rule}",
        *quantized_lines(next(iter(search.programs.values()))),
        *(f"  attention {choice}" for choice in search.attention),
        f"  MFU is of {peak} in {search.dtype}: {convention}" if mfu else "",
    ]


def quantized_lines(program: Program) -> list[str]:
    """Returns which matmuls are quantized, one line; none if none is."""
    count = len(program.quantized)
    name = program.options.quantize
    matmuls = f"matmuls of {count} weight{'s' * (count > 1)}"
    return [f"  {name:<7} {matmuls}: {', '.join(program.quantized)}"] if name else []


def _options(search: Search, candidate: Candidate) -> list[str]:
    """Returns what is in host memory, and the axes that are padded."""
    in_host_memory = [*search.offload, *["activations"] * (ON_HOST in candidate.remat)]
    padded = [name for name, _ in search.programs[candidate.remat].options.padded]
    texts = ((in_host_memory, "in host memory"), (padded, "padded"))
    return [f"{' and '.join(names)} {text}" for names, text in texts if names]


def _reasons(search: Search) -> list[Reason]:
    """Returns the reasons for the dtype and the options of the best layout that a search chooses without a request."""
    reasons = search.dtype_reason, search.assignment, search.alternative, search.saved_values
    return [reason for reason in reasons if reason is not None]


def _rate_text(rates: Rates) -> str:
    """Returns tokens per second, or examples per second for data without sequences."""
    unit = "tokens" if rates.tokens_per_second else "examples"
    return f"{rates.tokens_per_second or rates.examples_per_second:,.0f} {unit}/s"


def mfu_text(rates: Rates) -> str:
    """Returns the MFU in percent; empty where it is unknown."""
    return "" if rates.mfu is None else f"{100 * rates.mfu:.1f}"


def layout_cells(search: Search, candidate: Candidate) -> tuple[str, ...]:
    """Returns the cells of a candidate below `LAYOUT_HEADS`."""
    return (
        candidate.layout,
        str(candidate.whole_mesh),
        candidate.stages_text,
        candidate.remat,
        str(candidate.microbatches),
        f"{candidate.step_seconds:.4g}",
        mfu_text(search.rates(candidate)),
        bytes_text(candidate.peak_bytes),
    )


def bytes_by_collective(moved: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Returns the bytes of each kind of collective over some mesh axes, by its name as text.

    Example:
      >>> bytes_by_collective({"fsdp": {"all-gather": 64}})
      {'all-gather over fsdp': 64}
    """
    return {f"{kind} over {axes}": size for axes, kinds in moved.items() for kind, size in kinds.items()}


def array_lines(leaf: Placement, moved: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns the sharding of one array, its bytes, the reason, and its collectives by mesh axis, a line each."""
    memory = "" if leaf.memory_kind == DEVICE else " in host memory"
    lines = [
        f"{leaf.path} {leaf.dtype}{list(leaf.shape)} {leaf.axes}: {tuple(leaf.partition_spec)}",
        f"  {bytes_text(leaf.local_bytes)} per device{memory}; {leaf.reason or 'sharded as it is used'}",
    ]
    sizes = bytes_by_collective(moved)
    return lines + (
        [f"  {name}: {bytes_text(size)} per step" for name, size in sizes.items() if size]
        or ["  no collectives move it"]
    )


def explained(search: Search, plan: Plan, path: str) -> tuple[list[str], dict[str, Any]]:
    """Returns the sharding of one array of a plan, the reason for it, and its collectives, as text and as JSON."""
    leaf = plan[path]
    moved = evaluated(search, search.best).collectives_of(leaf.path) if search.best and leaf.kind != "batch" else {}
    return array_lines(leaf, moved), {"explained": asdict(leaf) | {"collectives": moved}}


def chunked_logits(search: Search, plan: Plan) -> tuple[list[str], dict[str, Any]]:
    """Returns the memory that chunks of the logits save, as text and as JSON."""
    assert search.best is not None
    program = search.program_of(search.best)
    count = plan.schedule.loss_chunks
    saved = saved_bytes(program, plan, search.cluster)
    line = f"logits in {count} chunks of tokens: {bytes_text(saved)} less per device than in one"
    line = line if count > 1 else str(suiting_chunks(program, plan, search.cluster)[1])
    return [line], {"logits": {"chunks": count, "saved_bytes": saved}}
