"""No plan sends more bytes than the naive program: the same step under `jax.jit` with the shardings of its inputs.

`benchmarks/naive_bytes.py` compares them and has the known exceptions, each with the reason.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

sys.path.append(str(ROOT / "benchmarks"))

import naive_bytes  # noqa: E402
from sampling import sampled  # noqa: E402

QUICK = [("sorted_moe", "fsdp+tensor"), ("cnn", "fsdp+tensor"), ("lora", "hsdp"), ("pixelcnn", "hsdp")]
"""Sorted experts, a gradient that is larger than its activations, hidden classes, gradients of convolutions."""


@pytest.mark.parametrize(("name", "preset"), sampled(naive_bytes.cells(), QUICK))
def test_a_plan_sends_at_most_the_bytes_of_the_naive_program(name: str, preset: str) -> None:
    row = naive_bytes.compared(name, preset)
    if "refused" in row:
        pytest.skip(row["refused"])
    is_above = naive_bytes.ratio(row) > naive_bytes.ROUNDED
    assert is_above == (row["cell"] in naive_bytes.ABOVE), f"{naive_bytes.ratio(row):.3f} of the naive program"


def test_every_exception_is_a_cell_and_has_a_reason() -> None:
    names = {f"{name} {preset}" for name, preset in naive_bytes.cells()}
    assert naive_bytes.ABOVE.keys() <= names and all(naive_bytes.ABOVE.values())
