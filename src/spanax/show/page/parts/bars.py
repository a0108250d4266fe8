"""Bars: what something is made of, as stacked bars on one scale, with a table of the numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.tables import scrolled

NEAR = 0.3
"""A limit is drawn beside what takes more than this share of it."""

COLOURS = 8
"""How many colours style.css has; what follows is the same colours in stripes."""


@dataclass(frozen=True)
class Bar:
    """One bar: its label, and its parts by name; what is 0 is left out.

    Example:
      >>> Bar("plan", {"parameters": 6, "activations": 2}).total
      8
    """

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def stacked(caption: str, bars: Sequence[Bar], text: Callable[[float], str], limit: float | None = None) -> Node:
    """Bars below each other on one scale, the parts of one name in one colour.

    Args:
      caption: what is shown, for who cannot see it.
      bars: from top to bottom.
      text: writes a value.
      limit: where a line is drawn across them.
    """
    names = list(dict.fromkeys(name for bar in bars for name, value in bar.parts.items() if value > 0))
    most = max(bar.total for bar in bars) or 1
    # Beside a limit that is far away nothing could be told apart.
    is_near = limit is not None and most > NEAR * limit
    scale = max(most, limit or 0) if is_near else most
    figure = el("figure", class_="bars")
    for bar in bars:
        said = ", ".join(f"{name} {text(value)}" for name, value in bar.parts.items() if value > 0) or "nothing"
        track = el("div", class_="track", role="img", aria_label=f"{bar.label}: {said}; {text(bar.total)} in all")
        for at, name in enumerate(names):
            if (value := bar.parts.get(name, 0)) > 0:
                width = f"width:{100 * value / scale:.3f}%"
                shown = f"{name}: {text(value)}, {_share(value, bar.total)}"
                fill(track, el("span", class_=f"seg {colour(at)}", style=width, title=shown))
        if limit and is_near:
            fill(track, el("span", class_="limit", style=f"left:{100 * limit / scale:.3f}%", title=text(limit)))
        label = el("span", bar.label, class_="bar-label")
        fill(figure, el("div", label, track, el("span", text(bar.total), class_="bar-total"), class_="bar-row"))
    if limit:
        where = "the dashed line" if is_near else f"of which this is {100 * most / limit:.1f} %"
        fill(figure, el("p", f"A device may hold {text(limit)}, {where}.", class_="note"))
    return fill(figure, _legend(caption, bars, names, text))


def colour(at: int) -> str:
    """The class of the colour of a part, by its place among the names.

    Example:
      >>> colour(0), colour(9)
      ('c1', 'c2 striped')
    """
    return f"c{at % COLOURS + 1}" + (" striped" if at >= COLOURS else "")


def _legend(caption: str, bars: Sequence[Bar], names: Sequence[str], text: Callable[[float], str]) -> Node:
    """The numbers; with one bar also its shares."""
    heads = [*(bar.label for bar in bars), *["share"] * (len(bars) == 1)]
    row = el("tr", el("th", "of", scope="col"), *(el("th", head, scope="col", class_="number") for head in heads))
    body = el("tbody")
    for at, name in enumerate(names):
        cells = [el("th", el("span", class_=f"swatch {colour(at)}"), name, scope="row")]
        values = [bar.parts.get(name, 0) for bar in bars]
        cells += [el("td", text(value) if value else "–", class_="number") for value in values]
        if len(bars) == 1:
            cells.append(el("td", _share(values[0], bars[0].total), class_="number share"))
        fill(body, el("tr", *cells))
    head = el("thead", row, class_=None if len(bars) > 1 else "unseen")
    return scrolled(caption, el("table", el("caption", caption, class_="unseen"), head, body, class_="legend"))


def _share(value: float, total: float) -> str:
    return f"{100 * value / total:.1f} %"
