"""The page of a search: every retained layout, to sort and filter, and the best plan."""

from spanax.plan.advice.summary import Summary
from spanax.plan.candidate import Candidate, Search
from spanax.plan.plan import Plan
from spanax.show.page.document import Block, Cell, Fact, Page, Part, table
from spanax.show.page.plan import array_blocks, price_blocks, seconds_text, sentence
from spanax.show.search import LAYOUT_HEADS, layout_cells, mfu_text
from spanax.units import bytes_text, count_text


def search_page(summary: Summary, plan: Plan | None, workload: str) -> Page:
    """Returns the page of a search; `plan` is its best layout with its predicted cost."""
    search = summary.search
    lead = f"Nothing fits: {summary.shortfall}."
    if plan is not None:
        lead = f"Best: {plan.layout.name} on {plan.mesh}. {sentence(plan.why)}"
    layouts = layouts_part(search)
    count = len(layouts["rows"])
    note = f"{count:,} of {search.layouts_priced:,} layouts priced: the fastest, and the best of every kind."
    blocks = [Block("Layouts", [layouts], note)]
    if search.rejected:
        rejected = sorted(search.rejected.items(), key=lambda item: -item[1])
        rows = [(str(reason), (f"{count:,}", count)) for reason, count in rejected]
        blocks.append(Block("Excluded", [table("excluded layouts", ("reason", "layouts"), rows)]))
    if plan is not None:
        blocks += [*price_blocks(plan), *array_blocks(plan)]
    return Page("layouts", f"{workload} on {search.cluster}", lead, _facts(summary), blocks)


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


def _facts(summary: Summary) -> list[Fact]:
    search = summary.search
    best = summary.search.best
    devices = Fact("devices", f"{search.cluster.num_devices:,}", str(search.cluster))
    priced = Fact("priced", f"{search.layouts_priced:,}", f"layouts in {search.search_seconds:.2f} s")
    if best is None:
        return [devices, priced, Fact("fits", "none", summary.shortfall, is_bad=True)]
    rates = search.rates(best)
    limit = search.cluster.memory_bytes
    mfu = "" if rates.mfu is None else f"{mfu_text(rates)} % MFU"
    kind = "tokens/s" if rates.tokens_per_second else "examples/s"
    room = f"of {bytes_text(limit)}" if limit else "per device"
    return [
        devices,
        priced,
        Fact("best step", seconds_text(best.step_seconds), mfu),
        Fact("speed", count_text(rates.tokens_per_second or rates.examples_per_second), kind),
        Fact("peak memory", bytes_text(best.peak_bytes), room),
    ]
