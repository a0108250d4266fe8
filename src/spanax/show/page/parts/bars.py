"""Draws stacked bars on one scale, with a table of the numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.tables import scrolled

NEAR = 0.3
"""A limit is drawn if the largest bar exceeds this fraction of it."""

COLOURS = 8
"""Number of colors in style.css; further parts repeat them in stripes."""


@dataclass(frozen=True)
class Bar:
    """One bar: its label, and the sizes of its parts by name; parts of size 0 are omitted.

    Example:
      >>> Bar("plan", {"parameters": 6, "activations": 2}).total
      8
    """

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.parts.values())


def stacked(caption: str, bars: Sequence[Bar], text: Callable[[float], str], limit: float | None = None) -> Node:
    """Returns bars below each other on one scale; parts with the same name have the same color.

    Args:
      caption: description for screen readers.
      bars: from top to bottom.
      text: formats a value.
      limit: position of a line across the bars.
    """
    names = list(dict.fromkeys(name for bar in bars for name, value in bar.parts.items() if value > 0))
    largest = max(bar.total for bar in bars) or 1
    # On the scale of a distant limit the bars would be too short to compare.
    is_near = limit is not None and largest > NEAR * limit
    scale = max(largest, limit or 0) if is_near else largest
    figure = el("figure", class_="bars")
    for bar in bars:
        parts = ", ".join(f"{name} {text(value)}" for name, value in bar.parts.items() if value > 0) or "nothing"
        track = el("div", class_="track", role="img", aria_label=f"{bar.label}: {parts}; {text(bar.total)} in total")
        for index, name in enumerate(names):
            if (value := bar.parts.get(name, 0)) > 0:
                width = f"width:{100 * value / scale:.3f}%"
                shown = f"{name}: {text(value)}, {_share(value, bar.total)}"
                fill(track, el("span", class_=f"seg {colour(index)}", style=width, title=shown))
        if limit and is_near:
            fill(track, el("span", class_="limit", style=f"left:{100 * limit / scale:.3f}%", title=text(limit)))
        label = el("span", bar.label, class_="bar-label")
        fill(figure, el("div", label, track, el("span", text(bar.total), class_="bar-total"), class_="bar-row"))
    if limit:
        where = " (dashed line)" if is_near else f"; the peak is {100 * largest / limit:.1f} % of it"
        fill(figure, el("p", f"Memory of a device: {text(limit)}{where}.", class_="note"))
    return fill(figure, _legend(caption, bars, names, text))


def colour(index: int) -> str:
    """Returns the CSS class of the color of a part, by the index of its name.

    Example:
      >>> colour(0), colour(9)
      ('c1', 'c2 striped')
    """
    return f"c{index % COLOURS + 1}" + (" striped" if index >= COLOURS else "")


def _legend(caption: str, bars: Sequence[Bar], names: Sequence[str], text: Callable[[float], str]) -> Node:
    """Returns a table of the numbers; for a single bar, also of the shares."""
    heads = [*(bar.label for bar in bars), *["share"] * (len(bars) == 1)]
    row = el("tr", el("th", "of", scope="col"), *(el("th", head, scope="col", class_="number") for head in heads))
    body = el("tbody")
    for index, name in enumerate(names):
        cells = [el("th", el("span", class_=f"swatch {colour(index)}"), name, scope="row")]
        values = [bar.parts.get(name, 0) for bar in bars]
        cells += [el("td", text(value) if value else "–", class_="number") for value in values]
        if len(bars) == 1:
            cells.append(el("td", _share(values[0], bars[0].total), class_="number share"))
        fill(body, el("tr", *cells))
    head = el("thead", row, class_=None if len(bars) > 1 else "unseen")
    return scrolled(caption, el("table", el("caption", caption, class_="unseen"), head, body, class_="legend"))


def _share(value: float, total: float) -> str:
    return f"{100 * value / total:.1f} %"
