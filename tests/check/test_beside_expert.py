"""What a step sends and holds, at most what the same step by hand does."""

from typing import Any

import pytest

import collective_bytes
import expert

AT_MOST = (1.001, 1.02)
"""Of what is sent and of what is held, over that by hand."""

QUICK = ("moe", "expert/8")


def cases() -> list[Any]:
    return [
        pytest.param(name, layout, marks=() if (name, layout) == QUICK else pytest.mark.slow)
        for name in ("gpt", "vit", "moe")
        for layout in expert.WORKLOADS[name].presets
    ]


@pytest.mark.parametrize(("name", "layout"), cases())
def test_no_more_than_by_hand(name: str, layout: str) -> None:
    row = collective_bytes.measure(name, layout, by_hand=["expert"])
    assert row["expert"]["sent_bytes"] > 10_000
    assert row["sent_bytes_over_expert"] <= AT_MOST[0]
    assert row["peak_bytes_over_expert"] <= AT_MOST[1]
