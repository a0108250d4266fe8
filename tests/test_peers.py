"""Peers of a benchmark that did other work are not compared."""

import math

import pytest

from peers.alike import differences

DONE = {"parameters": 1000, "tokens": 64, "flops": 1e9, "losses": [3.0, 2.5]}


def test_the_same_work_in_another_order_of_sums_is_the_same() -> None:
    assert differences({"a": DONE, "b": DONE | {"flops": 1.005e9, "losses": [3.0, 2.5001]}}) == {}


@pytest.mark.parametrize(
    ("other", "reported"),
    [
        ({"parameters": 1001}, "1,001 parameters, not 1,000"),
        ({"tokens": 32}, "32 tokens, not 64"),
        ({"flops": 1.1e9}, "1.1e+09 FLOPs a step, not 1e+09"),
        ({"losses": [3.0, 2.6]}, "loss 2.60000 in step 2, not 2.50000"),
        ({"losses": [3.0, math.nan]}, "loss nan in step 2, not 2.50000"),
    ],
)
def test_other_work_is_reported(other: dict[str, object], reported: str) -> None:
    assert differences({"a": DONE, "b": DONE | other}) == {"b": reported}
