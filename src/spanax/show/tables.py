"""Formats tables as text."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def table_text(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int = 140) -> str:
    """Returns a table as plain lines, without colors; markup and emoji codes in cells stay text.

    Args:
      columns: the headers; no header line if all are empty.
      rows: the cells.
      width: the largest number of letters per line.

    Example:
      >>> print(table_text(("axis", "size"), [("batch", "8")]))
      axis   size
      batch  8
    """
    table = Table(*columns, box=None, pad_edge=False, show_header=any(columns))
    for row in rows:
        table.add_row(*row)
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
