"""Builds HTML tables with a caption, columns, and rows of texts or elements; wide tables scroll horizontally."""

from collections.abc import Collection, Sequence

from spanax.show.page.parts.markup import Inside, Node, el, fill


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Inside]],
    numbers: Collection[int] = (),
    *,
    is_sorted: bool = False,
) -> Node:
    """Returns a table that scrolls if it is wider than the page.

    Args:
      caption: description for screen readers.
      columns: headers.
      rows: texts or elements; the first cell of a row is its header.
      numbers: indices of right-aligned columns.
      is_sorted: whether a click on a header sorts the rows, by the attribute data-value where present.
    """

    def css_class(column: int) -> str | None:
        return "number" if column in numbers else None

    def head(name: str) -> Inside:
        return el("button", name, type="button", class_="sort") if is_sorted and name else name

    heads = [el("th", head(name), scope="col", class_=css_class(column)) for column, name in enumerate(columns)]
    body = el("tbody")
    for row in rows:
        cells = [el("td", cell, class_=css_class(column)) for column, cell in enumerate(row) if column]
        fill(body, el("tr", el("th", row[0], scope="row", class_=css_class(0)), *cells))
    kind = "sortable" if is_sorted else None
    element = el("table", el("caption", caption, class_="unseen"), el("thead", el("tr", *heads)), body, class_=kind)
    return scrolled(caption, element)


def scrolled(name: str, inside: Node) -> Node:
    """Returns an element in a box that scrolls, also with the keyboard."""
    return el("div", inside, class_="scroll", role="region", aria_label=name, tabindex=0)
