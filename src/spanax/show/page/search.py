"""Ranked: every layout that a search kept, as a table that can be sorted and sifted."""

from collections.abc import Sequence

from spanax.plan.candidate import Candidate, Search, shortfall
from spanax.plan.plan import Plan
from spanax.plan.space import AXES
from spanax.show.page import plan as of_plan
from spanax.show.page.document import Page
from spanax.show.page.parts.blocks import Block, Figure
from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.tables import table
from spanax.show.search import candidate_json
from spanax.units import bytes_text, count_text

HEADS = ("layout", "step", "MFU %", "memory", "fits", "mesh", "stages", "remat", "micro")
NUMBERS = {1, 2, 3, 8}


def search_page(found: Search, plan: Plan | None, workload: str) -> Page:
    """A search as a page; `plan` is its best, priced."""
    best = found.best
    title = f"{workload} on {found.cluster}"
    lead = f"Best: {plan.layout.name} on {plan.mesh}. {plan.why[:1].upper()}{plan.why[1:]}." if plan is not None else (
        f"Nothing fits: {shortfall(found)}."
    )  # fmt: skip
    shown = len(_rows(found))
    priced = f"{found.layouts_priced:,} layouts priced"
    note = f"{shown:,} of {priced}: the fastest, and the fastest of every kind. Press a head to sort."
    blocks = [Block("Layouts", [search_table(found)], note)]
    if found.rejected:
        rejected = sorted(found.rejected.items(), key=lambda item: -item[1])
        left = [(str(reason), f"{count:,}") for reason, count in rejected]
        blocks.append(Block("Left out", [table("left out", ("why", "layouts"), left, {1})]))
    if plan is not None:
        blocks += of_plan.blocks(plan)
    return Page("layouts", title, lead, _figures(found, best), blocks)


def search_table(found: Search) -> Node:
    """The layouts with what sifts them: the family, whether they fit, and the axes of the mesh."""
    rows, body = _rows(found), search_rows(found)
    whole = table("layouts, the fastest first", HEADS, [cells for cells, _ in body], NUMBERS, is_sorted=True)
    for node, (_, told) in zip(whole.iterfind(".//tbody/tr"), body, strict=True):
        for key, value in told.items():
            node.set(f"data-{key}", value)
    return el("div", _controls(rows), whole, class_="ranked")


def search_rows(found: Search) -> list[tuple[list[str | Node], dict[str, str]]]:
    """The cells of each layout by HEADS, and what it can be sifted by; the fastest first."""
    rows = _rows(found)
    # Bars that say something: against a step four times as long as the best, and against all the memory there is.
    longest = 4 * min((one.step_seconds for one, _ in rows), default=0.0)
    largest = found.cluster.memory_bytes or max((one.peak_bytes for one, _ in rows), default=0)
    return [_row(found, one, fits, (longest, largest)) for one, fits in rows]


def _rows(found: Search) -> list[tuple[Candidate, bool]]:
    """All candidates by time, each with whether it fits."""
    nearest = () if found.too_large else found.nearest
    rows = [(one, True) for one in found.candidates] + [(one, False) for one in (*found.too_large, *nearest)]
    return sorted(rows, key=lambda row: row[0].step_seconds)


def _controls(rows: Sequence[tuple[Candidate, bool]]) -> Node:
    """What sifts the rows; shown by the script, without which it would do nothing."""
    names = list(dict.fromkeys(_family(one) for one, _ in rows))
    sift = el("form", class_="sift", hidden="hidden", aria_label="Which layouts to show")
    options = [el("option", "all", value=""), *(el("option", name, value=name) for name in names)]
    family = el("select", *options, name="family", aria_label="family")
    fill(sift, el("label", "family ", family))
    for axis in AXES:
        sizes = sorted({size for one, _ in rows for name, size in _axes(one) if name == axis})
        if sizes:
            options = [el("option", "any", value=""), el("option", "not split", value="1")]
            options += [el("option", str(size), value=str(size)) for size in sizes if size > 1]
            size = el("select", *options, name=f"axis-{axis}", aria_label=axis)
            fill(sift, el("label", f"{axis} ", size))
    fits = el("input", type="checkbox", name="fits", checked="checked" if any(fits for _, fits in rows) else None)
    count = el("output", class_="note", aria_live="polite")
    return fill(sift, el("label", fits, " only what fits"), count)


def _row(found: Search, one: Candidate, fits: bool, most: Sequence[float]) -> tuple[list[str | Node], dict[str, str]]:
    said = candidate_json(found, one)
    mfu = 100 * said["mfu"] if said["mfu"] is not None else None
    cells: list[str | Node] = [
        one.layout,
        _value(of_plan.seconds_text(one.step_seconds), one.step_seconds, most[0]),
        _value("" if mfu is None else f"{mfu:.1f}", -1 if mfu is None else mfu),
        _value(bytes_text(one.peak_bytes), one.peak_bytes, most[1]),
        el("span", "yes" if fits else "no", class_="fit" if fits else "fit no"),
        str(one.mesh),
        one.stages_text,
        one.remat,
        _value(f"{one.microbatches}", one.microbatches),
    ]
    told = {"family": _family(one), "fits": "yes" if fits else "no"}
    return cells, told | {f"axis-{name}": str(size) for name, size in _axes(one)}


def _value(text: str, value: float, most: float = 0) -> Node:
    """A number to sort by, with a bar below it where `most` is given."""
    meter = el("span", class_="meter", style=f"--part:{min(100, 100 * value / most):.0f}%") if most else None
    return el("span", text, meter, data_value=value)


def _family(one: Candidate) -> str:
    """The name of the layout, without what is said of sequences; with stages, a pipeline."""
    name = one.layout.removesuffix("+seq")
    return f"pipeline, {name}" if one.num_stages > 1 and "pipeline" not in name else name


def _axes(one: Candidate) -> list[tuple[str, int]]:
    return [(name, size) for name, size in one.mesh.axes if size > 1]


def _figures(found: Search, best: Candidate | None) -> list[Figure]:
    figures = [Figure("devices", f"{found.cluster.num_devices:,}", str(found.cluster))]
    figures.append(Figure("priced", f"{found.layouts_priced:,}", f"layouts in {found.search_seconds:.2f} s"))
    if best is None:
        return [*figures, Figure("fits", "none", shortfall(found), is_bad=True)]
    said = candidate_json(found, best)
    mfu = f"{100 * said['mfu']:.1f} % MFU" if said["mfu"] is not None else ""
    rate = said["tokens_per_second"] or said["examples_per_second"]
    kind = "tokens/s" if said["tokens_per_second"] else "examples/s"
    limit = found.cluster.memory_bytes
    return [
        *figures,
        Figure("best step", of_plan.seconds_text(best.step_seconds), mfu),
        Figure("speed", count_text(rate), kind),
        Figure("peak memory", bytes_text(best.peak_bytes), f"of {bytes_text(limit)}" if limit else "a device"),
    ]
