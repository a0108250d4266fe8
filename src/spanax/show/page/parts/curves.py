"""Draws values over the steps of a run as lines, thinned without losing their extremes."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spanax.show.page.parts.markup import Node, el, fill
from spanax.train.record.metric_curves import Point, thinned


@dataclass(frozen=True)
class Curve:
    """A line of a chart; `is_dotted` draws points without a line."""

    name: str
    points: Sequence[Point]
    is_dotted: bool = False


def chart(title: str, curves: Sequence[Curve], text: Callable[[float], str], from_zero: bool = False) -> Node:
    """Returns lines over the steps in one picture; the pointer or arrow keys show values."""
    curves = [Curve(curve.name, thinned(curve.points), curve.is_dotted) for curve in curves if curve.points]
    xs, ys = ([point[dim] for curve in curves for point in curve.points] for dim in (0, 1))
    left, right = min(xs), max(max(xs), min(xs) + 1)
    marks = ticks(0.0 if from_zero else min(ys), max(ys))
    low, high = min(marks[0], min(ys)), max(marks[-1], max(ys))

    def place(point: Point) -> str:
        return f"{1000 * (point[0] - left) / (right - left):.1f} {300 - 300 * (point[1] - low) / (high - low):.1f}"

    picture = el("svg", viewBox="0 0 1000 300", preserveAspectRatio="none", aria_hidden="true")
    for mark in marks:
        fill(picture, el("path", d=f"M{place((left, mark))}H1000", class_="grid"))
    for number, curve in enumerate(curves, 1):
        is_dotted = curve.is_dotted or len(curve.points) == 1
        dots = "".join(f"M{place(point)}h0" for point in curve.points)
        path = dots if is_dotted else "M" + "L".join(map(place, curve.points))
        fill(picture, el("path", d=path, class_=f"line l{number}" + " dots" * is_dotted))
    data = json.dumps([[curve.name, [[x, y, text(y)] for x, y in curve.points]] for curve in curves])
    plot = el(
        "div", picture, class_="plot", role="img", tabindex=0, aria_label=_description(title, curves, text),
        data_curves=data, data_x=json.dumps([left, right]), data_y=json.dumps([low, high]),
    )  # fmt: skip
    for mark in marks:
        fill(plot, el("span", text(mark), class_="y", style=f"top:{100 - 100 * (mark - low) / (high - low):.2f}%"))
    ends = el("div", el("span", f"step {left:g}"), el("span", f"{right:g}"), class_="x", aria_hidden="true")
    keys = [el("span", el("span", class_=f"swatch c{number}"), curve.name) for number, curve in enumerate(curves, 1)]
    legend = el("figcaption", el("strong", title), *(keys if len(keys) > 1 else ()))
    return el("figure", legend, plot, ends, class_="curves")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round numbers that enclose the range from `low` to `high`.

    Example:
      >>> ticks(2.9, 5.41), ticks(0, 7300)
      ([2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5], [0.0, 2000.0, 4000.0, 6000.0, 8000.0])
    """
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if factor * power * count >= 0.99 * span)
    first = math.floor(low / step)
    return [index * step for index in range(first, max(math.ceil(high / step), first + 1) + 1)]


def _description(title: str, curves: Iterable[Curve], text: Callable[[float], str]) -> str:
    """Returns a description of a chart for screen readers."""
    parts = []
    for curve in curves:
        (first, initial), (last, final) = curve.points[0], curve.points[-1]
        lowest, highest = (text(choose(y for _, y in curve.points)) for choose in (min, max))
        parts.append(
            f"{curve.name} from {text(initial)} at step {first:g} to {text(final)} at step {last:g}, "
            f"between {lowest} and {highest}"
        )
    return f"{title}: " + "; ".join(parts)
