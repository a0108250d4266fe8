"""The page on scale says what the planner says."""

from pathlib import Path

import pytest

from sampling import sampled

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "notes" / "scale.md").read_text()


ROWS = ["llama3-8b v5p weak 16", "llama3-8b h100 weak 16"]


@pytest.mark.parametrize("name", sampled(ROWS, ROWS[1:]))
def test_the_page_has_the_planners_rows(name: str) -> None:
    import scale

    (point,) = [item for item in scale.asked() if item.name == name]
    assert scale.row(scale.planned(point, scale.searched(point))) in PAGE


def test_the_page_has_every_point_and_the_curves() -> None:
    import generated_tables
    import scale

    points = list(scale.asked())
    table = PAGE.split(scale.BEGIN)[1].split(generated_tables.END)[0]
    rows = [line for line in table.splitlines() if line.startswith(tuple(f"| {model} |" for model in scale.MODELS))]
    reported = [" ".join(cell.strip().replace(",", "") for cell in row.split("|")[1:5]) for row in rows]
    assert reported == [point.name for point in points]
    assert (ROOT / "notes" / "scale.svg").read_text().count("<polyline") == 8
