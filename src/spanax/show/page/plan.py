"""Plan: the page of one plan: what it is expected to take, where every array lies, and who works when."""

from collections.abc import Sequence

from spanax.plan.cost.prediction import Prediction
from spanax.plan.pipeline.ticks import ticks_of
from spanax.plan.plan import Plan
from spanax.show.page.document import Page
from spanax.show.page.parts.bars import Bar, stacked
from spanax.show.page.parts.blocks import Block, Figure
from spanax.show.page.parts.markup import Node, el
from spanax.show.page.parts.schedule_grid import schedule_grid
from spanax.show.page.parts.traffic import traffic
from spanax.show.page.placement import KINDS, placement
from spanax.units import bytes_text, quantity_text

POINT = "Point at an array, or reach it with the keyboard, to see which device holds which part."

MOST_TASKS = 1 << 14
"""A schedule of more is not drawn: a screen shows a hundredth of it, and its table takes seconds."""


def plan_page(plan: Plan) -> Page:
    """A plan as a page."""
    return Page("plan", plan_title(plan), f"{plan.why[:1].upper()}{plan.why[1:]}.", plan_figures(plan), blocks(plan))


def plan_title(plan: Plan) -> str:
    """The layout and its mesh."""
    return f"{plan.layout.name} on {plan.mesh}"


def plan_figures(plan: Plan) -> list[Figure]:
    """What one wants to know of a plan first."""
    price, schedule = plan.price, plan.schedule
    on = f"{plan.mesh}" if price is None else price.cluster
    found = [Figure("devices", f"{plan.mesh.size:,}", on)]
    if price is not None:
        mfu = f"{100 * price.mfu:.1f} % MFU" if price.mfu is not None else "expected"
        found.append(Figure("a step", seconds_text(price.step_seconds), mfu))
        found.append(peak_figure(price))
    found.append(Figure("state a device", bytes_text(plan.state_bytes()), "parameters, optimizer, other"))
    parts = f"{schedule.microbatches} microbatch{'es' * (schedule.microbatches > 1)}"
    stages = f", {schedule.num_stages} stages" if schedule.num_stages > 1 else ""
    remat, dtype = schedule.remat or "as written", schedule.compute_dtype
    found.append(Figure("schedule", parts, f"remat {remat}" + (f", in {dtype}" if dtype else "") + stages))
    return found


def peak_figure(price: Prediction) -> Figure:
    """The peak memory beside its limit."""
    limit = price.limit_bytes
    beside = f"of {bytes_text(limit)} a device" if limit else "a device"
    return Figure("peak memory", bytes_text(price.peak_bytes), beside, bool(limit and price.peak_bytes > limit))


def blocks(plan: Plan, *, is_priced: bool = True) -> list[Block]:
    """The sections of a plan; without those of its price where another page has them."""
    found = price_blocks(plan.price) if plan.price is not None and is_priced else []
    if plan.price is None and is_priced:
        found = [Block("Memory of a device", [state_bars(plan)], "The state alone: the plan was made without a price.")]
    found.append(Block("Where every array lies", [placement(plan)], POINT))
    if plan.schedule.num_stages > 1:
        found.append(Block("Schedule of the pipeline", [_schedule(plan)]))
    return found


def _schedule(plan: Plan) -> Node:
    schedule = plan.schedule
    tasks = schedule.num_stages * schedule.microbatches * schedule.num_chunks
    if tasks > MOST_TASKS:
        return el("p", f"It is too long to be drawn: {tasks:,} microbatches of stages.", class_="note")
    return schedule_grid(ticks_of(schedule))


def price_blocks(price: Prediction) -> list[Block]:
    """What a step takes, holds and moves, as expected."""
    memory = memory_bars([Bar("expected", price.memory)], price.limit_bytes)
    steps, moved = step_bars([Bar("expected", price.seconds)]), traffic({"expected": price.moved})
    return [
        Block("Where a step's time goes", [steps], f"Expected on {price.cluster}.", is_half=True),
        Block("Memory of a device", [memory], "At the fullest moment, as expected.", is_half=True),
        Block("Traffic by mesh axis", [moved], TRAFFIC_NOTE, is_half=True),
    ]


TRAFFIC_NOTE = "What one device receives in one step: results of collectives."


def step_bars(bars: Sequence[Bar]) -> Node:
    """Seconds of one step by what they go to."""
    return stacked("seconds of a step", bars, seconds_text)


def memory_bars(bars: Sequence[Bar], limit_bytes: int | None) -> Node:
    """Bytes of one device by what they are for."""
    return stacked("bytes of a device", bars, bytes_text, limit_bytes)


def state_bars(plan: Plan) -> Node:
    """The state and the batch of one device by kind."""
    held = {title.lower(): plan.state_bytes(kind) for kind, title in KINDS.items() if kind != "batch"}
    return memory_bars([Bar("state", held | {"batch": sum(leaf.local_bytes for leaf in plan.batch)})], None)


def seconds_text(seconds: float) -> str:
    """A time for people, three digits.

    Example:
      >>> seconds_text(0.02078), seconds_text(0)
      ('20.8 ms', '0 ns')
    """
    return quantity_text(seconds, "seconds", 3)
