"""Formats the answers of several clusters as a table, and as JSON."""

from typing import Any

from spanax.plan.advice.quotes import Quote, Quotes
from spanax.plan.advice.what_if import Budget
from spanax.show.search import candidate_json, mfu_text, search_json
from spanax.show.tables import table_text
from spanax.units import bytes_text


def _heads(quotes: Quotes) -> list[str]:
    """Returns the columns of the table: those of a run and of prices only where they are known."""
    rows = [quote for quote in quotes if quote.search is not None]
    has_tokens = any(quote.search.tokens_per_step for quote in rows if quote.search is not None)
    columns = ["cluster", "layout", "step s", "tokens/s" if has_tokens else "examples/s", "MFU %"]
    columns += ["memory per device", "largest batch"]
    if any(quotes.device_hours(quote) is not None for quote in rows):
        columns.append("device-hours")
    if any(quote.dollars_per_hour is not None for quote in rows):
        columns.append("cost $" if "device-hours" in columns else "$ per hour")
    return columns


def _cells(quotes: Quotes, quote: Quote) -> list[str]:
    """Returns the cells of a cluster; only its name if it has no plan."""
    search = quote.search
    best = None if search is None else search.best
    if search is None or best is None:
        return [quote.on]
    rates = search.rates(best)
    limit = search.cluster.memory_bytes
    room = f" of {bytes_text(limit)}" if limit else ""
    stages = f"; {best.stages_text}" if best.stages_text else ""
    hours = quotes.device_hours(quote)
    dollars = quote.dollars_per_hour_of_all
    if hours is not None and quote.dollars_per_hour is not None:
        dollars = hours * quote.dollars_per_hour
    values = {"device-hours": _rounded(hours, ",.4g"), "cost $": _rounded(dollars, ",.2f")}
    values["$ per hour"] = values["cost $"]
    return [
        quote.on,
        f"{best.title}{stages}",
        f"{best.step_seconds:.4g}",
        f"{rates.tokens_per_second or rates.examples_per_second:,.0f}",
        mfu_text(rates),
        f"{bytes_text(best.peak_bytes)}{room}",
        "" if quote.largest is None else f"{quote.largest.batch_size:,}",
        *(values[head] for head in _heads(quotes) if head in values),
    ]


def _rounded(value: float | None, form: str) -> str:
    """Returns a number in a format, or as an integer from 10,000 on; empty for none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1e4 else format(value, form)


def _notes(quotes: Quotes) -> list[str]:
    """Returns what the table leaves open: the setting, how the largest batch is counted, the unit of prices."""
    first = next((quote.search for quote in quotes if quote.search is not None), None)
    largest = next((quote.largest for quote in quotes if quote.largest is not None), None)
    lines = []
    if first is not None:
        lines.append(f"step: batch {first.batch_size:,}; memory: the predicted peak of what JAX can use")
    if largest is not None and largest.best is not None:
        count = largest.best.microbatches
        lines.append(
            f"largest batch: in multiples of the devices, as of --microbatches {count} --offload none --pad none; "
            "more microbatches fit larger ones"
        )
    lines += [f"no largest batch on {quote.on}: {quote.problem}" for quote in quotes if quote.plan and quote.problem]
    if quotes.tokens is not None and first is not None and first.tokens_per_step is None:
        lines.append("no device-hours or cost: a batch of this model has no tokens; --examples N counts examples")
    prices = {quote.cluster.chip.name: quote.dollars_per_hour for quote in quotes if quote.cluster is not None}
    known = [f"{name} {price:g}" for name, price in prices.items() if price is not None]
    if known:
        lines.append(f"prices in dollars per device-hour: {', '.join(known)}")
        lines += [f"no price of {name}: --price {name}=DOLLARS" for name, price in prices.items() if price is None]
    return lines


def quotes_text(quotes: Quotes) -> str:
    """Returns a row per cluster, and what the table leaves open; the row of a cluster without a plan says why."""
    columns = _heads(quotes)
    rows = [_cells(quotes, quote) for quote in quotes]
    lines = table_text(columns, [row + [""] * (len(columns) - len(row)) for row in rows], width=200).splitlines()
    start = lines[0].index("layout")
    for place, quote in enumerate(quotes):
        if quote.plan is None:
            lines[1 + place] = f"{quote.on:<{start}}{quote.problem}"
    return "\n".join([*lines, "", *_notes(quotes)]).rstrip()


def run_text(total: Budget, kind: str, cost: float | None) -> str:
    """Returns the hours and the dollars of a run of that many tokens or examples on one cluster."""
    within = {None: "", True: ", within the budget", False: ", OVER the budget"}[total.within]
    hours = f"{total.hours:.4g} hours, {total.device_hours:.4g} device-hours"
    dollars = "" if cost is None else f", {cost:,.2f} dollars at {cost / total.device_hours:g} per device-hour"
    return (
        f"{total.tokens:.3g} {kind} take {hours}{dollars}{within}; "
        f"save every {total.checkpoint_seconds / 60:.0f} minutes"
    )


def quotes_json(quotes: Quotes, top: int) -> dict[str, Any]:
    """Returns the object of `spanax plan --json` for several clusters."""
    return {
        "clusters": [_quote_json(quotes, quote, top) for quote in quotes],
        "tokens": quotes.tokens,
        "examples": quotes.examples,
        "notes": _notes(quotes),
    }


def _quote_json(quotes: Quotes, quote: Quote, top: int) -> dict[str, Any]:
    data = {"on": quote.on, "problem": quote.problem or None}
    data |= {} if quote.summary is None else search_json(quote.summary, top)
    hours = quotes.device_hours(quote)
    price = quote.dollars_per_hour
    largest = quote.largest
    found = None
    if largest is not None and largest.best is not None:
        names = ("layout", "mesh", "remat", "microbatches", "memory", "upper_bytes")
        values = candidate_json(largest, largest.best)
        found = {"batch": largest.batch_size} | {name: values[name] for name in names}
        found["loss_chunks"] = next(iter(largest.programs.values())).loss_chunks
    return data | {
        "largest_batch": found,
        "device_hours": hours,
        "dollars_per_device_hour": price,
        "dollars_per_hour": quote.dollars_per_hour_of_all,
        "cost_dollars": None if hours is None or price is None else hours * price,
    }
