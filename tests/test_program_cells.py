"""Bytes and FLOPs of compiled steps, tests/data/program_cells.json, next to what is predicted for them.

The cells are compiled by `python benchmarks/program_cells.py --compile FOLDER` and `--store FOLDER`, with libtpu.
"""

import json
import statistics
from typing import Any

import pytest

from program_cells import CELLS, STORED, compare

QUICK = "lstm_lm.b"
"""Part of the name of a cell that is traced fast."""


def measured(only: str) -> list[dict[str, Any]]:
    truth = json.loads(STORED.read_text())
    return [compare(cell, truth[cell.name]) for cell in CELLS if only in cell.name and cell.name in truth]


def test_bytes_and_flops_of_a_small_language_model_are_predicted() -> None:
    [row] = measured(QUICK)
    assert abs(row["bytes_error"]) < 0.005 and abs(row["flops_error"]) < 0.001


@pytest.mark.slow
def test_half_of_the_small_programs_are_predicted_within_a_quarter() -> None:
    rows = measured("")
    assert len(rows) >= 50
    assert statistics.median(abs(row["bytes_error"]) for row in rows) < 0.25
    assert statistics.median(abs(row["flops_error"]) for row in rows) < 0.02
