"""Tables of a page: a caption, columns, and rows of texts or elements; wide ones scroll inside of themselves."""

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
    """A table that scrolls by itself where it is wider than the page.

    Args:
      caption: what it is, for who cannot see it.
      columns: their heads.
      rows: texts or elements; the first of a row is its head.
      numbers: columns that are set flush right.
      is_sorted: whether its heads sort it, by the attribute data-value where a cell has one.
    """

    def at(column: int) -> str | None:
        return "number" if column in numbers else None

    def head(name: str) -> Inside:
        return el("button", name, type="button", class_="sort") if is_sorted and name else name

    heads = [el("th", head(name), scope="col", class_=at(column)) for column, name in enumerate(columns)]
    body = el("tbody")
    for row in rows:
        cells = [el("td", one, class_=at(column)) for column, one in enumerate(row) if column]
        fill(body, el("tr", el("th", row[0], scope="row", class_=at(0)), *cells))
    kind = "sortable" if is_sorted else None
    whole = el("table", el("caption", caption, class_="unseen"), el("thead", el("tr", *heads)), body, class_=kind)
    return scrolled(caption, whole)


def scrolled(name: str, inside: Node) -> Node:
    """What may be wider than the page, in a box that scrolls, by keys too."""
    return el("div", inside, class_="scroll", role="region", aria_label=name, tabindex=0)
