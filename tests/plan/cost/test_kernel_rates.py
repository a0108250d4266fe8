"""Rates of attention kernels: those of published tables, ordered as measured, and estimates that say so."""

import math

import numpy as np
import pytest

from spanax.hardware.chips import catalogue, chip_named
from spanax.plan.cost.kernel_rates import RATES, attention_flops_per_second, kernel_on, rate_of

CUDNN_FORWARD = {512: 315, 1024: 410, 2048: 484, 4096: 518, 8192: 529, 16384: 539}
"""TFLOP/s, causal, heads of 128, H100. Source: arXiv 2407.08608, figure 5."""


@pytest.mark.parametrize("length", CUDNN_FORWARD)
def test_lengths_are_as_in_the_published_table(length: int) -> None:
    chip = chip_named("h100")
    share = attention_flops_per_second("cudnn", chip, 128, length) / attention_flops_per_second(
        "cudnn", chip, 128, 1 << 14
    )
    assert share == pytest.approx(CUDNN_FORWARD[length] / CUDNN_FORWARD[16384], rel=0.07)


def test_rates_grow_with_the_length_the_head_and_the_generation() -> None:
    chip = chip_named("h100")
    lengths = attention_flops_per_second("cudnn", chip, 128, np.asarray([128, 1024, 8192, 131072]))
    heads = attention_flops_per_second("cudnn", chip, np.asarray([32, 64, 128]), 4096)
    kernels = [attention_flops_per_second(name, chip, 128, 4096) for name in ("flash", "flash2", "cudnn", "flash3")]
    for rates in (lengths, heads, np.asarray(kernels)):
        assert (np.diff(rates) > 0).all()
    assert max(kernels) < chip.peak_flops["bf16"]


def test_a_head_fills_half_of_a_wider_systolic_array() -> None:
    shares = [attention_flops_per_second("splash", chip_named(name), 128, 8192) / chip_named(name).peak_flops["bf16"]
              for name in ("v5p", "v6e")]  # fmt: skip
    assert shares[0] == 2 * shares[1]


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_chip_has_a_rate_or_an_estimate_that_says_so(name: str) -> None:
    chip = chip_named(name)
    if not chip.peak_flops:
        pytest.skip("its rates are measured")
    rate = rate_of(kernel_on(chip), chip)
    assert 0 < rate.both < 1 and rate.backward <= rate.forward and rate.source
    assert rate in RATES.values() or "estimate" in rate.source
    assert math.isfinite(attention_flops_per_second(kernel_on(chip), chip, 128, 4096))
