"""Generated tables in pages of the documentation, between two markers."""

from datetime import date
from pathlib import Path

END = "<!-- end of the table -->"


def write_table(page: Path, begin: str, table: str) -> None:
    """Replaces the text between the marker `begin` and the next `END` in a page."""
    before, _, rest = page.read_text().partition(f"{begin}\n")
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no table between '{begin}' and '{END}'")
    page.write_text(f"{before}{begin}\n{table}\n{END}{after}")


def write_figures(page: Path, command: str, table: str) -> None:
    """Replaces the table of a command's figures in a page, and their date."""
    begin = next(line for line in page.read_text().splitlines() if line.startswith(f"<!-- figures: {command},"))
    write_table(page, begin, table)
    page.write_text(page.read_text().replace(begin, f"<!-- figures: {command}, {date.today()} -->"))
