"""The page of a plan: predicted time, memory and traffic, the placement of every array, and the pipeline schedule."""

import math
from collections.abc import Mapping, Sequence

from spanax.check.array_placement import copies
from spanax.plan.pipeline.ticks import ticks_of
from spanax.plan.plan import Plan, path_pattern
from spanax.plan.prediction import Moved
from spanax.plan.sharding.placement import DEVICE, Placement
from spanax.show.page.document import Block, Cell, Fact, Page, bars, table, text
from spanax.show.placement import dims_text, repeated_arrays, spec_text
from spanax.show.schedules import ticks_text
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
    title = f"{plan.layout.name} on {plan.mesh}: {count_text(num_params)} parameters{batch}"
    return Page("plan", title, sentence(plan.why), _facts(plan), [*price_blocks(plan), *array_blocks(plan)])


def sentence(words: str) -> str:
    """Returns words with a capital letter and a period."""
    return f"{words[:1].upper()}{words[1:]}."


def _facts(plan: Plan) -> list[Fact]:
    price = plan.price
    schedule = plan.schedule
    facts = [Fact("devices", f"{plan.mesh.size:,}", f"{plan.mesh}" if price is None else price.cluster)]
    if price is not None:
        limit = price.limit_bytes
        mfu = "predicted" if price.mfu is None else f"{100 * price.mfu:.1f} % MFU"
        room = f"of {bytes_text(limit)} per device" if limit else "per device"
        is_over = limit is not None and price.peak_bytes > limit
        facts.append(Fact("step time", seconds_text(price.step_seconds), mfu))
        facts.append(Fact("peak memory", bytes_text(price.peak_bytes), room, is_over))
    facts.append(Fact("state per device", bytes_text(plan.state_bytes()), "parameters, optimizer, other"))
    details = [f"remat {schedule.remat or 'as written'}"]
    details += [f"in {schedule.compute_dtype}"] if schedule.compute_dtype else []
    details += [f"{schedule.num_stages} stages"] if schedule.num_stages > 1 else []
    count = f"{schedule.microbatches} microbatch{'es' * (schedule.microbatches > 1)}"
    return [*facts, Fact("schedule", count, ", ".join(details))]


def price_blocks(plan: Plan) -> list[Block]:
    """Returns the predicted step time, memory and traffic of a plan; its state alone if it has no predicted cost."""
    price = plan.price
    if price is None:
        state = {name: plan.state_bytes(kind) for kind, name in KINDS.items() if kind != "batch"}
        state["batch"] = sum(leaf.local_bytes for leaf in plan.batch)
        memory = bars("state per device", {"state": state}, bytes_text)
        return [Block("Memory per device", [memory], "State only: the plan has no predicted cost.")]
    blocks = cost_blocks(price.seconds, price.memory, price.limit_bytes)
    return [*blocks, traffic_block({"predicted": price.moved})]


def cost_blocks(seconds: Mapping[str, float], memory: Mapping[str, int], limit_bytes: int | None = None) -> list[Block]:
    """Returns the predicted seconds per step by category, and the bytes per device by group."""
    time_part = bars("predicted seconds per step", {"predicted": seconds}, seconds_text)
    memory_part = bars("predicted bytes per device", {"predicted": memory}, bytes_text, limit_bytes)
    return [Block("Step time", [time_part]), Block("Memory per device", [memory_part], "Predicted peak.")]


def traffic_block(sides: Mapping[str, Moved]) -> Block:
    """Returns the bytes that a device receives per step, by mesh axes; `sides` are `predicted`, `compiled` or both."""
    sizes_by_label = {
        f"{axes}, {side}": kinds
        for side, moved in sides.items()
        for axes, kinds in moved.items()
        if any(kinds.values())
    }
    caption = "bytes received per device and step, by mesh axes"
    part = bars(caption, sizes_by_label, bytes_text) if sizes_by_label else text(caption, "No communication.")
    return Block("Communication by mesh axis", [part], "Bytes that a device receives from collectives per step.")


def array_blocks(plan: Plan) -> list[Block]:
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
        leaf.path if len(alike) == 1 else f"{path_pattern(leaf.path)} ×{len(alike)}",
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
