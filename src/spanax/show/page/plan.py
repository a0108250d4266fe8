"""Builds the page of a plan: predicted time, memory and traffic, placement of arrays, and pipeline schedule."""

import math
from collections.abc import Sequence

from spanax.plan.pipeline.ticks import ticks_of
from spanax.plan.plan import Plan
from spanax.plan.prediction import Prediction
from spanax.show.page.document import Page
from spanax.show.page.parts.bars import Bar, stacked
from spanax.show.page.parts.blocks import Block, Figure
from spanax.show.page.parts.markup import Node, el
from spanax.show.page.parts.schedule_grid import schedule_grid
from spanax.show.page.parts.traffic import traffic
from spanax.show.page.placement import KINDS, placement
from spanax.units import bytes_text, count_text, quantity_text

POINT = "Hover over an array, or select it with the keyboard, to see the shard of each device."

MOST_TASKS = 1 << 14
"""Largest schedule that is drawn: a screen shows a hundredth of it, and its table takes seconds."""


def plan_page(plan: Plan) -> Page:
    """Returns the page of a plan."""
    return Page("plan", plan_title(plan), f"{plan.why[:1].upper()}{plan.why[1:]}.", plan_figures(plan), blocks(plan))


def plan_title(plan: Plan) -> str:
    """Returns the layout, its mesh, the number of parameters and the batch size."""
    num_params = sum(math.prod(leaf.shape) for leaf in plan.leaves if leaf.kind == "param")
    batch = f", batch size {plan.setting.batch_size:,}" if plan.batch else ""
    return f"{plan.layout.name} on {plan.mesh}: {count_text(num_params)} parameters{batch}"


def plan_figures(plan: Plan) -> list[Figure]:
    """Returns the main numbers of a plan."""
    price, schedule = plan.price, plan.schedule
    on = f"{plan.mesh}" if price is None else price.cluster
    figures = [Figure("devices", f"{plan.mesh.size:,}", on)]
    if price is not None:
        mfu = f"{100 * price.mfu:.1f} % MFU" if price.mfu is not None else "predicted"
        figures.append(Figure("step time", seconds_text(price.step_seconds), mfu))
        figures.append(peak_figure(price))
    figures.append(Figure("state per device", bytes_text(plan.state_bytes()), "parameters, optimizer, other"))
    parts = f"{schedule.microbatches} microbatch{'es' * (schedule.microbatches > 1)}"
    stages = f", {schedule.num_stages} stages" if schedule.num_stages > 1 else ""
    remat, dtype = schedule.remat or "as written", schedule.compute_dtype
    figures.append(Figure("schedule", parts, f"remat {remat}" + (f", in {dtype}" if dtype else "") + stages))
    return figures


def peak_figure(price: Prediction) -> Figure:
    """Returns peak memory with its limit."""
    limit = price.limit_bytes
    detail = f"of {bytes_text(limit)} per device" if limit else "per device"
    return Figure("peak memory", bytes_text(price.peak_bytes), detail, bool(limit and price.peak_bytes > limit))


def blocks(plan: Plan, *, is_priced: bool = True) -> list[Block]:
    """Returns the sections of a plan; `is_priced` includes those of its predicted cost."""
    blocks = price_blocks(plan.price) if plan.price is not None and is_priced else []
    if plan.price is None and is_priced:
        blocks = [Block("Memory per device", [state_bars(plan)], "State only: the plan has no predicted cost.")]
    blocks.append(Block("Placement of arrays", [placement(plan)], POINT))
    if plan.schedule.num_stages > 1:
        blocks.append(Block("Pipeline schedule", [_schedule(plan)]))
    return blocks


def _schedule(plan: Plan) -> Node:
    schedule = plan.schedule
    tasks = schedule.num_stages * schedule.microbatches * schedule.num_chunks
    if tasks > MOST_TASKS:
        return el("p", f"Too long to draw: {tasks:,} tasks.", class_="note")
    return schedule_grid(ticks_of(schedule))


def price_blocks(price: Prediction) -> list[Block]:
    """Returns predicted step time, memory and traffic."""
    memory = memory_bars([Bar("predicted", price.memory)], price.limit_bytes)
    steps, moved = step_bars([Bar("predicted", price.seconds)]), traffic({"predicted": price.moved})
    return [
        Block("Step time", [steps], f"Predicted for {price.cluster}.", is_half=True),
        Block("Memory per device", [memory], "Predicted peak.", is_half=True),
        Block("Communication by mesh axis", [moved], TRAFFIC_NOTE, is_half=True),
    ]


TRAFFIC_NOTE = "Bytes that a device receives from collectives per step."


def step_bars(bars: Sequence[Bar]) -> Node:
    """Returns seconds per step by category."""
    return stacked(f"{_names(bars)} seconds per step", bars, seconds_text)


def memory_bars(bars: Sequence[Bar], limit_bytes: int | None) -> Node:
    """Returns bytes per device by category."""
    return stacked(f"{_names(bars)} bytes per device", bars, bytes_text, limit_bytes)


def _names(bars: Sequence[Bar]) -> str:
    """Returns the labels of bars, which distinguish figures of equal quantities for screen readers."""
    return " and ".join(bar.label for bar in bars)


def state_bars(plan: Plan) -> Node:
    """Returns bytes of state and batch per device by kind."""
    state = {title.lower(): plan.state_bytes(kind) for kind, title in KINDS.items() if kind != "batch"}
    return memory_bars([Bar("state", state | {"batch": sum(leaf.local_bytes for leaf in plan.batch)})], None)


def seconds_text(seconds: float) -> str:
    """Returns a time with a unit and three significant digits.

    Example:
      >>> seconds_text(0.02078), seconds_text(0)
      ('20.8 ms', '0 ns')
    """
    return quantity_text(seconds, "seconds", 3).replace("us", "µs")  # files have the unit in ASCII
