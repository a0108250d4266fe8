"""Formats two plans side by side: seconds, memory and collectives of a step, and the placement of arrays."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from spanax.plan.candidate import Search, plan_of, shortfall
from spanax.plan.evaluate import with_price
from spanax.plan.plan import Moved, Plan, Prediction
from spanax.show.search import bytes_by_collective
from spanax.show.tables import table_text
from spanax.units import bytes_text

MOST = 8
"""The number of rows that the text lists of a group of `BY_VALUE`, if that is one of each term and pass; it adds up the
others. JSON has all of them."""

MOVES = "what moves"
COMPUTES = "seconds of"
BY_VALUE = (COMPUTES, MOVES)
"""Groups with a row per value."""


def difference_json(first: Plan, second: Plan) -> dict[str, Any]:
    """Returns two plans with their `schedules` as plain values: `rows` of costs if both have them, and `changes`."""
    rows = list[dict[str, Any]]()
    if first.price is not None and second.price is not None:
        sides = _groups(first.price), _groups(second.price)
        rows = [
            {"group": group, "term": term, "first": float(left.get(term, 0)), "second": float(right.get(term, 0))}
            for (group, left), right in zip(sides[0].items(), sides[1].values(), strict=True)
            for term in dict.fromkeys([*left, *right])
        ]
    rows = [row for row in rows if row["first"] or row["second"]]
    plans = [first, second]
    return {
        "plans": [plan.title for plan in plans],
        "schedules": [str(plan.schedule) for plan in plans],
        "rows": rows,
        "changes": first.diff(second),
    }


def _groups(price: Prediction) -> dict[str, Mapping[str, float]]:
    """Returns the figures of a predicted cost by group and term."""
    return {
        "seconds": {"step": price.step_seconds, **price.seconds},
        COMPUTES: price.seconds_at,
        "hidden seconds": price.hidden,
        "memory": {"peak": price.peak_bytes, **price.memory},
        "bytes moved": bytes_by_collective(price.moved),
        MOVES: _by_value(price.moved_at),
    }


def _by_value(moved_at: Mapping[str, Moved]) -> dict[str, int]:
    return {
        f"{kind}: {name}": size for name, moved in moved_at.items() for kind, size in bytes_by_collective(moved).items()
    }


def difference_text(data: Mapping[str, Any]) -> str:
    """Returns what `difference_json` returns as a table, without figures that are equal, and a line per change."""
    cells = []
    for group, rows in itertools.groupby(data["rows"], key=lambda row: row["group"]):
        cells += [_cells(row) for row in (_most_different([*rows]) if group in BY_VALUE else rows)]
    cells = [row for row in cells if row[2] != row[3]]
    cells[:0] = [("schedule", "", *data["schedules"], "")] if cells else []
    table = table_text(("", "", *data["plans"], "difference"), cells, width=200) if cells else ""
    return "\n".join(filter(None, [table, *data["changes"]])) or "the plans are the same"


def _most_different(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows that differ most, at least one of each term and pass, then the sums of the others."""
    differing = sorted((row for row in rows if _more(row)), key=lambda row: -abs(_more(row)))
    firsts = {_pass(row): row for row in reversed(differing)}
    by_rank = sorted(differing, key=lambda row: row is not firsts[_pass(row)])
    num_shown = max(MOST, len(firsts))
    others = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in by_rank[num_shown:]:
        others[_pass(row)[0]].append(row)
    shown = sorted(by_rank[:num_shown], key=lambda row: -abs(_more(row)))
    for name, left in others.items():
        sums = {side: sum(row[side] for row in left) for side in ("first", "second")}
        shown += left if len(left) == 1 else [{**left[0], "term": f"{name}: {len(left)} others", **sums}]
    return shown


def _more(row: Mapping[str, Any]) -> float:
    return float(row["second"] - row["first"])


def _pass(row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the term or collective of a row of one value, and the pass."""
    name, _, value = row["term"].partition(": ")
    return name, value.partition(" ")[0]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = row["first"], row["second"], abs(_more(row))
    first, second, size = [f"{each:.3g} s" if "seconds" in row["group"] else bytes_text(each) for each in sizes]
    return row["group"], row["term"], first, second, ("-" if _more(row) < 0 else "+") + size


def why_json(search: Search, plan: Plan, other: Search, fits_with: Sequence[str]) -> dict[str, Any]:
    """Returns the best plan of a search beside that of a search over requested layouts, and why the latter is refused.

    Args:
      search: a search.
      plan: its best plan.
      other: the search over requested layouts.
      fits_with: what would make a layout of `other` fit, if none does.

    Raises:
      SpanaxError: one of them cannot run.
    """
    problem = "" if other.best else f"{shortfall(other)}; it fits with {'; or with '.join(fits_with)}"
    candidate = next(iter((*other.candidates, *other.nearest)), None)
    if search.best is None or candidate is None:
        return {"problem": problem}
    second = with_price(plan_of(other, candidate), other, candidate)
    return {"problem": problem} | difference_json(with_price(plan, search, search.best), second)


def why_text(data: Mapping[str, Any]) -> str:
    """Returns what `why_json` returns for what was `asked`, without the changes of single arrays."""
    problem = data["problem"]
    head = f"{data['asked']} is not possible: {problem}" if problem else f"{data['asked']} beside {data['plans'][0]}:"
    return "\n".join([head, *([difference_text({**data, "changes": []})] if "rows" in data else [])])
