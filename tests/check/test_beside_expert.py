"""What a step sends and holds, at most what the same step by hand does; where it is more, by how much."""

from typing import Any

import pytest

import collective_bytes
import expert

AT_MOST = (1.001, 1.02)
"""Of what is sent and of what is held, over that by hand."""

MORE = {
    # A table is gathered twice by the partitioner, and once by the compiled program.
    ("moe", "fsdp"): (1.03, 1.02),
    ("moe", "tensor"): (1.005, 1.02),
    ("moe", "data+tensor"): (1.01, 1.02),
    ("moe", "fsdp+tensor"): (1.02, 1.02),
    # The router's logits are split over the experts, so their gradient is summed once more.
    ("moe", "expert"): (1.08, 1.04),
    # The classes stay whole: what comes out of a model is split as a last resort.
    ("vit", "tensor"): (1.001, 1.03),
    ("vit", "data+tensor"): (1.03, 1.02),
    ("vit", "fsdp+tensor"): (1.03, 1.02),
}


QUICK = ("moe", "fsdp+tensor")


def cases() -> list[Any]:
    return [
        pytest.param(name, layout, marks=() if (name, layout) == QUICK else pytest.mark.slow)
        for name in ("gpt", "vit", "moe")
        for layout in expert.WORKLOADS[name].presets
    ]


@pytest.mark.parametrize(("name", "layout"), cases())
def test_no_more_than_by_hand(name: str, layout: str) -> None:
    row = collective_bytes.measure(name, layout, by_hand=["expert"])
    sent, held = MORE.get((name, layout), AT_MOST)
    assert row["expert"]["sent_bytes"] > 10_000
    assert row["sent_bytes_over_expert"] <= sent
    assert row["peak_bytes_over_expert"] <= held
