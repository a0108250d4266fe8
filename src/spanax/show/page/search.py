"""Builds the page of a search: every retained layout in a table to sort and filter."""

from collections.abc import Sequence

from spanax.plan.advice.summary import Summary
from spanax.plan.candidate import Candidate, Search
from spanax.plan.plan import Plan
from spanax.plan.space import AXES
from spanax.show.page import plan as of_plan
from spanax.show.page.document import Page
from spanax.show.page.parts.blocks import Block, Figure
from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.tables import table
from spanax.show.search import mfu_text
from spanax.units import bytes_text, count_text

HEADS = ("layout", "step", "MFU %", "memory", "fits", "mesh", "stages", "remat", "microbatches")
NUMBERS = {1, 2, 3, 8}


def search_page(summary: Summary, plan: Plan | None, workload: str) -> Page:
    """Returns the page of a search; `plan` is its best layout with its predicted cost."""
    search = summary.search
    lead = f"Nothing fits: {summary.shortfall}."
    if plan is not None:
        lead = f"Best: {plan.layout.name} on {plan.mesh}. {plan.why[:1].upper()}{plan.why[1:]}."
    priced = f"{search.layouts_priced:,} layouts priced"
    note = f"{len(_rows(search)):,} of {priced}: the fastest, and the fastest of every kind. Click a header to sort."
    blocks = [Block("Layouts", [search_table(search)], note)]
    if search.rejected:
        rejected = sorted(search.rejected.items(), key=lambda item: -item[1])
        rows = [(str(reason), f"{count:,}") for reason, count in rejected]
        blocks.append(Block("Excluded", [table("excluded layouts", ("reason", "layouts"), rows, {1})]))
    if plan is not None:
        blocks += of_plan.blocks(plan)
    return Page("layouts", f"{workload} on {search.cluster}", lead, _figures(summary), blocks)


def search_table(search: Search) -> Node:
    """Returns the layouts with filters: the family, whether they fit, and the axes of the mesh."""
    rows, body = _rows(search), search_rows(search)
    element = table("layouts, the fastest first", HEADS, [cells for cells, _ in body], NUMBERS, is_sorted=True)
    for node, (_, attributes) in zip(element.iterfind(".//tbody/tr"), body, strict=True):
        for key, value in attributes.items():
            node.set(f"data-{key}", value)
    return el("div", _controls(rows), element, class_="ranked")


def search_rows(search: Search) -> list[tuple[list[str | Node], dict[str, str]]]:
    """Returns the cells of each layout by HEADS, and its filter attributes; the fastest first."""
    rows = _rows(search)
    # Full bars are four times the best step time, and the memory of a device.
    longest = 4 * min((candidate.step_seconds for candidate, _ in rows), default=0.0)
    largest = search.cluster.memory_bytes or max((candidate.peak_bytes for candidate, _ in rows), default=0)
    return [_row(search, candidate, fits, (longest, largest)) for candidate, fits in rows]


def _rows(search: Search) -> list[tuple[Candidate, bool]]:
    """Returns all candidates by time, each with whether it fits."""
    nearest = () if search.too_large else search.nearest
    rows = [(candidate, True) for candidate in search.candidates] + [
        (candidate, False) for candidate in (*search.too_large, *nearest)
    ]
    return sorted(rows, key=lambda row: row[0].step_seconds)


def _controls(rows: Sequence[tuple[Candidate, bool]]) -> Node:
    """Returns the filters; hidden until the script runs."""
    names = list(dict.fromkeys(_family(candidate) for candidate, _ in rows))
    form = el("form", class_="sift", hidden="hidden", aria_label="Which layouts to show")
    options = [el("option", "all", value=""), *(el("option", name, value=name) for name in names)]
    family = el("select", *options, name="family", aria_label="family")
    fill(form, el("label", "family ", family))
    for axis in AXES:
        sizes = sorted({size for candidate, _ in rows for name, size in _axes(candidate) if name == axis})
        if sizes:
            options = [el("option", "any", value=""), el("option", "not sharded", value="1")]
            options += [el("option", str(size), value=str(size)) for size in sizes if size > 1]
            size = el("select", *options, name=f"axis-{axis}", aria_label=axis)
            fill(form, el("label", f"{axis} ", size))
    fits = el("input", type="checkbox", name="fits", checked="checked" if any(fits for _, fits in rows) else None)
    count = el("output", class_="note", aria_live="polite")
    return fill(form, el("label", fits, " only layouts that fit"), count)


def _row(
    search: Search, candidate: Candidate, fits: bool, limits: Sequence[float]
) -> tuple[list[str | Node], dict[str, str]]:
    rates = search.rates(candidate)
    cells: list[str | Node] = [
        candidate.layout,
        _value(of_plan.seconds_text(candidate.step_seconds), candidate.step_seconds, limits[0]),
        _value(mfu_text(rates), -1 if rates.mfu is None else 100 * rates.mfu),
        _value(bytes_text(candidate.peak_bytes), candidate.peak_bytes, limits[1]),
        el("span", "yes" if fits else "no", class_="fit" if fits else "fit no"),
        str(candidate.mesh),
        candidate.stages_text,
        candidate.remat,
        _value(f"{candidate.microbatches}", candidate.microbatches),
    ]
    attributes = {"family": _family(candidate), "fits": "yes" if fits else "no"}
    return cells, attributes | {f"axis-{name}": str(size) for name, size in _axes(candidate)}


def _value(text: str, value: float, limit: float = 0) -> Node:
    """Returns a number to sort by, with a bar below it if `limit` is not 0."""
    meter = el("span", class_="meter", style=f"--part:{min(100, 100 * value / limit):.0f}%") if limit else None
    return el("span", text, meter, data_value=value)


def _family(candidate: Candidate) -> str:
    """Returns the name of the layout without its sequence parallelism; with stages, a pipeline."""
    name = candidate.layout.removesuffix("+seq")
    return f"pipeline, {name}" if candidate.num_stages > 1 and "pipeline" not in name else name


def _axes(candidate: Candidate) -> list[tuple[str, int]]:
    return [(name, size) for name, size in candidate.mesh.axes if size > 1]


def _figures(summary: Summary) -> list[Figure]:
    search, best = summary.search, summary.search.best
    figures = [Figure("devices", f"{search.cluster.num_devices:,}", str(search.cluster))]
    figures.append(Figure("priced", f"{search.layouts_priced:,}", f"layouts in {search.search_seconds:.2f} s"))
    if best is None:
        return [*figures, Figure("fits", "none", summary.shortfall, is_bad=True)]
    rates, limit = search.rates(best), search.cluster.memory_bytes
    mfu = "" if rates.mfu is None else f"{mfu_text(rates)} % MFU"
    kind = "tokens/s" if rates.tokens_per_second else "examples/s"
    return [
        *figures,
        Figure("best step", of_plan.seconds_text(best.step_seconds), mfu),
        Figure("speed", count_text(rates.tokens_per_second or rates.examples_per_second), kind),
        Figure("peak memory", bytes_text(best.peak_bytes), f"of {bytes_text(limit)}" if limit else "per device"),
    ]
