"""Formats tables of Rich as text."""

from rich.console import Console
from rich.table import Table


def table_text(table: Table, width: int = 140) -> str:
    """Returns a table as plain lines, without colors; markup and emoji codes in cells stay text.

    Example:
      >>> table = Table("axis", "size", box=None, pad_edge=False)
      >>> table.add_row("batch", "8")
      >>> print(table_text(table))
      axis   size
      batch  8
    """
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
