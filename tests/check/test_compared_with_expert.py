"""A step sends and stores no more bytes than the same step with an expert's annotations."""

from typing import Any

import pytest

import collective_bytes
import expert

MAX_SENT_RATIO, MAX_PEAK_RATIO = 1.001, 1.02

QUICK = ("moe", "expert/8")


def cases() -> list[Any]:
    return [
        pytest.param(name, layout, marks=() if (name, layout) == QUICK else pytest.mark.slow)
        for name in ("gpt", "vit", "moe", "lora")
        for layout in expert.WORKLOADS[name].presets
    ]


@pytest.mark.parametrize(("name", "layout"), cases())
def test_no_more_bytes_than_with_annotations(name: str, layout: str) -> None:
    row = collective_bytes.measure(name, layout, by_hand=["expert"])
    assert row["expert"]["sent_bytes"] > 10_000
    assert row["sent_bytes_over_expert"] <= MAX_SENT_RATIO
    assert row["argument_bytes_over_expert"] <= MAX_SENT_RATIO
    if name == "lora":
        return  # XLA:CPU copies a gathered matrix that is stored along its minor dim, which is larger than all else
    assert row["peak_bytes_over_expert"] <= MAX_PEAK_RATIO
