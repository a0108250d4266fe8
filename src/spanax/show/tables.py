"""Tables as text."""

from typing import Any

from rich.console import Console
from rich.table import Table


def table_text(table: Table, width: int = 140) -> str:
    """A table of rich as plain lines, without colours.

    Example:
      >>> table = Table("axis", "size", box=None, pad_edge=False)
      >>> table.add_row("batch", "8")
      >>> print(table_text(table))
      axis   size
      batch  8
    """
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def plain_text(value: Any, most: int = 300) -> str:
    """A value from elsewhere as one line that a terminal only shows.

    Example:
      >>> plain_text("a\\nb\\x1b[2J"), plain_text(2 / 3)
      ('a b [2J', '0.666667')
    """
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else " " for letter in text)[:most]
