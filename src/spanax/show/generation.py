"""Formats the layouts of a generation as text and JSON."""

from collections.abc import Sequence
from typing import Any

from spanax.plan.advice.generation import GenerationLayout, GenerationPlan
from spanax.show.tables import table_text
from spanax.units import bytes_text

HEADS = ("layout", "mesh", "step ms", "tokens/s", "prefill s", "memory")


def generation_json(plan: GenerationPlan, most: int | None, top: int) -> dict[str, Any]:
    """Returns the object of `spanax plan --generate --json`; bytes are per device, except those of one sequence."""
    programs = plan.programs
    return {
        "cluster": str(plan.cluster),
        "devices": plan.cluster.num_devices,
        "sequences": plan.num_sequences,
        "positions": programs.length,
        "dtype": programs.dtype,
        "cache_bytes_per_sequence": programs.cache_bytes,
        "cache_bytes_per_token": programs.cache_bytes // programs.length,
        "usable_bytes": plan.cluster.memory_bytes,
        "largest_batch": most,
        "best": None if plan.best is None else _layout_json(plan, plan.best),
        "nearest": None if plan.nearest is None else _layout_json(plan, plan.nearest),
        "candidates": [_layout_json(plan, layout) for layout in plan.layouts[:top]],
    }


def _layout_json(plan: GenerationPlan, layout: GenerationLayout) -> dict[str, Any]:
    return {
        "layout": layout.step.layout,
        "mesh": dict(layout.step.whole_mesh.axes),
        "step_seconds": layout.step.step_seconds,
        "tokens_per_second": plan.tokens_per_second(layout),
        "seconds": layout.step.seconds,
        "prefill_seconds": layout.prefill.step_seconds,
        "memory": {"parameters": layout.parameter_bytes, "caches": layout.cache_bytes, "peak": layout.peak_bytes},
        "upper_bytes": layout.upper_bytes,
    }


def generation_text(plan: GenerationPlan, most: int | None, top: int) -> str:
    """Returns the fastest layout that fits, and a table of the `top` fastest; or the one that needs least."""
    programs = plan.programs
    layout = plan.best or plan.nearest
    assert layout is not None
    limit = plan.cluster.memory_bytes
    usable = f", at most {bytes_text(layout.upper_bytes)} of {bytes_text(limit)} usable" if limit else ""
    sequences = (
        "not even one sequence for each device fits" if most is None else f"about {most:,} sequences fit in this layout"
    )
    step = layout.step
    rate = f"{plan.tokens_per_second(layout):,.0f} tokens/s"
    verdict = "" if plan.best else "nothing fits; least memory: "
    lines = [
        f"{verdict}{step.layout} on {plan.cluster} ({step.whole_mesh}): {_setting(plan)}",
        f"  step     {1e3 * step.step_seconds:.4g} ms, {rate}; {step.bottleneck}",
        f"  prefill  {layout.prefill.step_seconds:.3g} s for prompts of {programs.length:,} tokens",
        f"  memory   {bytes_text(layout.peak_bytes)} per device{usable}",
        f"           parameters {bytes_text(layout.parameter_bytes)}, caches {bytes_text(layout.cache_bytes)}, "
        f"activations, most of the prefill, {bytes_text(layout.activation_bytes)}",
        f"           the cache of one sequence has {bytes_text(programs.cache_bytes)}",
        f"  batch    {sequences}",
        *(["  note     these parameters are gathered once, as in `data`"] if layout.is_gathered else []),
        "",
        "",
    ]
    return "\n".join(lines) + table_text(HEADS, [_cells(plan, each) for each in plan.layouts[:top] or (layout,)])


def clusters_text(plans: Sequence[tuple[GenerationPlan, int | None]]) -> str:
    """Returns a table of the fastest layout on each cluster; one on which nothing fits has only its name."""
    first, _ = plans[0]
    rows = [
        (str(plan.cluster), *_cells(plan, plan.best), f"{most:,}") if plan.best and most else (str(plan.cluster),)
        for plan, most in plans
    ]
    return f"{_setting(first)}\n{table_text(('cluster', *HEADS, 'largest batch'), rows)}"


def _setting(plan: GenerationPlan) -> str:
    programs = plan.programs
    return f"{plan.num_sequences:,} sequences of {programs.length:,} tokens, parameters in {programs.dtype}"


def _cells(plan: GenerationPlan, layout: GenerationLayout) -> tuple[str, ...]:
    return (
        layout.step.layout,
        str(layout.step.whole_mesh),
        f"{1e3 * layout.step.step_seconds:.4g}",
        f"{plan.tokens_per_second(layout):,.0f}",
        f"{layout.prefill.step_seconds:.3g}",
        bytes_text(layout.peak_bytes),
    )
