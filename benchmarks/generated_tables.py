"""Generated tables in pages of the documentation, between two markers."""

from pathlib import Path

END = "<!-- end of the table -->"


def write_table(page: Path, begin: str, table: str) -> None:
    """Replaces the text between the marker `begin` and the next `END` in a page."""
    before, _, rest = page.read_text().partition(f"{begin}\n")
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no table between '{begin}' and '{END}'")
    page.write_text(f"{before}{begin}\n{table}\n{END}{after}")
