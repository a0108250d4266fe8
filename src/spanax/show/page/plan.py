"""The pages of a plan, and of the layouts of a search."""

import math
from collections.abc import Sequence

from spanax.check.array_placement import copies
from spanax.plan.advice.quotes import Quotes
from spanax.plan.advice.summary import Summary
from spanax.plan.candidate import Candidate, Search
from spanax.plan.pipeline.ticks import ticks_of
from spanax.plan.plan import Plan, shared_path
from spanax.plan.sharding.placement import DEVICE, Placement
from spanax.show.page.document import Block, Cell, Page, Part, bars, table, text
from spanax.show.placement import dims_text, repeated_arrays, spec_text
from spanax.show.quotes import quotes_text
from spanax.show.schedules import ticks_text
from spanax.show.search import LAYOUT_HEADS, layout_cells, search_text
from spanax.units import bytes_text, count_text, quantity_text

KINDS = {"param": "parameters", "batch": "batch", "optimizer": "optimizer", "other": "other state"}
"""Kinds of arrays in the order of the table, and their names."""

MAX_ROWS = 4000
"""Number of rows of the table of arrays."""

MAX_TASKS = 4000
"""Number of tasks of the largest schedule that is shown."""


def plan_page(plan: Plan) -> Page:
    """Returns the page of a plan."""
    num_params = sum(math.prod(leaf.shape) for leaf in plan.leaves if leaf.kind == "param")
    batch = f", batch size {plan.setting.batch_size:,}" if plan.batch else ""
    title = f"{plan.title}: {count_text(num_params)} parameters{batch}"
    return Page("plan", title, plan_blocks(plan))


def plan_blocks(plan: Plan) -> list[Block]:
    """Returns the sections of a plan: its text, predicted cost, arrays and schedule."""
    return [Block("Plan", [text("the plan", str(plan))]), *_price_blocks(plan), *_array_blocks(plan)]


def _price_blocks(plan: Plan) -> list[Block]:
    """Returns the predicted step time, memory and traffic of a plan that has a predicted cost."""
    price = plan.price
    if price is None:
        return []
    mfu = "" if price.mfu is None else f", {100 * price.mfu:.1f} % MFU"
    seconds = bars("predicted seconds per step", {"predicted": price.seconds}, seconds_text)
    memory = bars("predicted bytes per device", {"predicted": price.memory}, bytes_text, price.limit_bytes)
    moved = {axes: kinds for axes, kinds in price.moved.items() if any(kinds.values())}
    caption = "bytes received per device and step, by mesh axes"
    traffic = bars(caption, moved, bytes_text) if moved else text(caption, "No communication.")
    return [
        Block("Step time", [seconds], f"Predicted for {price.cluster}{mfu}."),
        Block("Memory per device", [memory], "Predicted peak."),
        Block("Communication by mesh axis", [traffic], "Bytes that a device receives from collectives per step."),
    ]


def _array_blocks(plan: Plan) -> list[Block]:
    """Returns the placement of every array, and the schedule of a pipeline."""
    order = list(KINDS)
    repeated = repeated_arrays((*plan.leaves, *plan.batch))
    repeated.sort(key=lambda alike: (order.index(alike[0].kind), -len(alike) * alike[0].local_bytes))
    heads = ("array", "kind", "dims", "spec", "per device", "shard", "shards", "copies", "reason", "communication")
    note = "Equal arrays of repeated blocks share a row. `spanax inspect --leaf` draws which device has which shard."
    if len(repeated) > MAX_ROWS:
        note += f" Shows the first {MAX_ROWS:,} of {len(repeated):,} rows."
    arrays = table("arrays", heads, [_array(alike, plan) for alike in repeated[:MAX_ROWS]])
    blocks = [Block("Placement of arrays", [arrays], note)]
    schedule = plan.schedule
    if schedule.num_stages > 1:
        num_tasks = schedule.num_stages * schedule.microbatches * schedule.num_chunks
        is_long = num_tasks > MAX_TASKS
        content = f"Too long to show: {num_tasks:,} tasks." if is_long else ticks_text(ticks_of(schedule))
        blocks.append(Block("Pipeline schedule", [text("pipeline schedule", content)]))
    return blocks


def _array(alike: Sequence[Placement], plan: Plan) -> list[Cell]:
    """Returns the row of equal arrays; their bytes are those of one."""
    leaf = alike[0]
    times = copies(alike[0], plan.mesh)
    num_shards = plan.mesh.size // times
    where = "" if leaf.memory_kind == DEVICE else " in host memory"
    return [
        shared_path([leaf.path for leaf in alike]) + (f" ×{len(alike)}" if len(alike) > 1 else ""),
        KINDS[leaf.kind],
        dims_text(leaf),
        spec_text(leaf.spec),
        (f"{bytes_text(leaf.local_bytes)}{where}", leaf.local_bytes),
        f"{leaf.dtype}{list(leaf.local_shape)}",
        (f"{num_shards:,}", num_shards),
        (f"{times:,}", times),
        leaf.reason or "sharded as it is used",
        _moves_text(leaf, plan),
    ]


def _moves_text(leaf: Placement, plan: Plan) -> str:
    """Returns the collectives of an array per step; for equal blocks, those of the first."""
    if leaf.kind == "batch":
        return "none: each device reads its rows"
    if leaf.kind != "param":
        return "see its parameter" if leaf.kind == "optimizer" else ""
    if plan.price is None:
        return "unknown: the plan has no predicted cost"
    moved = plan.price.moved_of.get(leaf.path)
    if moved is None:
        return "negligible"
    rows = sorted(((size, kind, axes) for axes, kinds in moved.items() for kind, size in kinds.items()), reverse=True)
    return "; ".join(f"{kind} over {axes} {bytes_text(size)}" for size, kind, axes in rows if size) or "none"


def seconds_text(seconds: float) -> str:
    """Returns a time with a unit and three significant digits.

    Example:
      >>> seconds_text(0.02078), seconds_text(0)
      ('20.8 ms', '0 ns')
    """
    return quantity_text(seconds, "seconds", 3).replace("us", "µs")  # files have the unit in ASCII


def search_page(summary: Summary, plan: Plan | None, workload: str) -> Page:
    """Returns the page of a search; `plan` is its best layout with its predicted cost."""
    search = summary.search
    layouts = layouts_part(search)
    count = len(layouts["rows"])
    note = f"{count:,} of {search.layouts_priced:,} layouts priced: the fastest, and the best of every kind."
    blocks = [
        Block("Best layout", [text("best layout", search_text(summary, top=0))]),
        Block("Layouts", [layouts], note),
    ]
    if plan is not None:
        blocks += plan_blocks(plan)
    return Page("layouts", f"{workload} on {search.cluster}", blocks)


def quotes_page(quotes: Quotes, workload: str) -> Page:
    """Returns the page of several clusters."""
    title = f"{workload} on {len(quotes)} clusters"
    return Page("clusters", title, [Block("Clusters", [text(title, quotes_text(quotes))])])


def layouts_part(search: Search, most: int | None = None) -> Part:
    """Returns the layouts as a table, those that fit first, by step time; at most `most`."""
    nearest = () if search.too_large else search.nearest
    fitting = [(candidate, "yes") for candidate in search.candidates]
    others = [(candidate, "no") for candidate in (*search.too_large, *nearest)]
    rows = [
        _row(search, *pair)
        for pairs in (fitting, others)
        for pair in sorted(pairs, key=lambda pair: pair[0].step_seconds)
    ]
    return table("layouts, the fastest first", (*LAYOUT_HEADS, "fits"), rows[:most])


def _row(search: Search, candidate: Candidate, fits: str) -> list[Cell]:
    layout, mesh, stages, remat, microbatches, step, mfu, memory = layout_cells(search, candidate)
    return [
        layout,
        mesh,
        stages,
        remat,
        (microbatches, candidate.microbatches),
        (step, candidate.step_seconds),
        (mfu, search.rates(candidate).mfu),
        (memory, candidate.peak_bytes),
        fits,
    ]
