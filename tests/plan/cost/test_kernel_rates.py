"""Rates of attention kernels: those of published tables, ordered as measured, and labeled estimates."""

import math

import numpy as np
import pytest

from spanax.hardware.chips import catalogue, chip_named
from spanax.plan.cost.kernel_rates import RATES, attention_flops_per_second, kernel_on, rate_of, vector_rate_of

CUDNN_FORWARD = {512: 315, 1024: 410, 2048: 484, 4096: 518, 8192: 529, 16384: 539}
"""TFLOP/s, causal, heads of 128, H100. Source: arXiv 2407.08608, figure 5."""


ON_BLACKWELL = {
    "gb200": {4096: (1297, 1105), 8192: (1563, 1279), 16384: (1646, 1371), 32768: (1686, 1441)},
    "gb300": {4096: (1679, 1198), 8192: (1927, 1391), 16384: (1998, 1494), 32768: (2031, 1552)},
}
"""TFLOP/s forward and backward, causal, heads of 128. Source: NVIDIA/cudnn-frontend, as `kernel_rates.CUDNN_TABLES`."""


@pytest.mark.parametrize("name", ON_BLACKWELL)
def test_rates_of_blackwell_are_those_of_the_published_table(name: str) -> None:
    for length, (forward, backward) in ON_BLACKWELL[name].items():
        rate = attention_flops_per_second("cudnn", chip_named(name), 128, length) / 1e12
        assert rate == pytest.approx(7 / (2 / forward + 5 / backward), rel=0.1)


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
def test_every_chip_has_a_rate_or_a_stated_estimate(name: str) -> None:
    chip = chip_named(name)
    if not chip.peak_flops:
        pytest.skip("its rates are measured")
    rate = rate_of(kernel_on(chip), chip)
    assert 0 < rate.both < 1 and rate.backward <= rate.forward and rate.source
    assert rate in RATES.values() or "estimate" in rate.source
    products, source = vector_rate_of(chip)
    matmuls = chip.flops_per_second("bf16" if "bf16" in chip.peak_flops else "fp16")
    assert 0 < products < matmuls / (1 if name.startswith("rtx") or name == "a10g" else 5) and source
    assert ("estimate" in source) == (chip.vector_flops_per_second is None)
    assert math.isfinite(attention_flops_per_second(kernel_on(chip), chip, 128, 4096))


def test_an_estimate_is_the_nearest_generation_with_its_half_length() -> None:
    b300, gb300 = (rate_of("cudnn", chip_named(name)) for name in ("b300", "gb300"))
    assert b300.source == "an estimate: the gb300's" and b300.half_length == gb300.half_length == 800
    assert (b300.forward, b300.backward) == (gb300.forward, gb300.backward)
    assert rate_of("flash3", chip_named("b200")).source == "an estimate: the h100's"
