"""The rates of attention kernels and of vector units, from published tables, or the estimates that replace them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanax.hardware.chip import Chip

CUDNN = "cudnn"
SPLASH = "splash"
FLASH = "flash"
FLASH2 = "flash2"
FLASH3 = "flash3"
"""The kernels: cuDNN's, JAX's on TPUs, and three generations of FlashAttention."""


@dataclass(frozen=True)
class Rate:
    """FLOP/s over the chip's 16-bit peak for long sequences and heads of 128, forward and backward pass.

    Masked scores are not counted. Causal sequences of `half_length` run at half the rate: blocks on the diagonal are
    masked in part, and on Blackwell a block has twice as many queries. `source` states where it was measured, or which
    estimate replaces a measurement.

    Source of the half lengths: arXiv 2407.08608, figure 5 (cuDNN on an H100 has 315, 410, 484, 518 and 539 TFLOP/s for
    512, 1k, 2k, 4k and 16k keys); NVIDIA/cudnn-frontend, as the rates of the GB200 (1,022, 1,297, 1,563, 1,646 and
    1,686 TFLOP/s for 2k to 32k keys) and of the H200 (484, 591, 644, 673 and 688).
    """

    forward: float
    backward: float
    source: str
    half_length: float = 330.0

    @property
    def both(self) -> float:
        """The rate of a forward and a backward pass, which has five matmuls to its two."""
        return 7.0 / (2.0 / self.forward + 5.0 / self.backward)


CUDNN_TABLES = "NVIDIA/cudnn-frontend, sdpa_benchmark_training"
"""Tables in `benchmark/`, in `results/*_only_cudnn`: causal attention of 64 heads of 128, 32,768 keys in 8 groups."""

SPLASH_ESTIMATE = "an estimate: no public table; the backward pass runs 7 matmuls where 5 suffice"
"""JAX's kernel computes scores and their gradient twice unless `use_fused_bwd_kernel`, whose default is False.

Source: jax-ml/jax, jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py, `BlockSizes`.
"""

RATES: dict[tuple[str, str], Rate] = {
    (FLASH, "a100"): Rate(
        0.37, 0.27, "arXiv 2307.08691, 1: 30 to 50 % forward, 25 to 35 % backward; the lower half, with a causal mask"
    ),
    (FLASH, "h100"): Rate(0.20, 0.146, "an estimate: the A100's kernel, 1.7 times as fast, as FlashAttention-2 is"),
    (FLASH2, "a100"): Rate(0.64, 0.55, "arXiv 2307.08691, figures 5 and 6: 200 and 170 of 312 TFLOP/s"),
    (FLASH2, "h100"): Rate(0.34, 0.30, "arXiv 2407.08608, figures 5 and 6: 335 of 989 TFLOP/s forward, 322 backward"),
    (FLASH3, "h100"): Rate(0.62, 0.52, "arXiv 2407.08608, figures 5 and 6: 616 of 989 TFLOP/s forward, 561 backward"),
    (CUDNN, "a100"): Rate(0.64, 0.55, "an estimate: FlashAttention-2's, whose algorithm it has"),
    (CUDNN, "h100"): Rate(0.55, 0.48, "arXiv 2407.08608, figures 5 and 6: 539 of 989 TFLOP/s forward, 516 backward"),
    (CUDNN, "h200"): Rate(0.70, 0.59, f"{CUDNN_TABLES}/h200_919: 688 and 581 of 989 TFLOP/s", 720.0),
    (CUDNN, "b200"): Rate(0.63, 0.49, f"{CUDNN_TABLES}/artifacts B200: 1,419 and 1,109 of 2,250 TFLOP/s", 800.0),
    (CUDNN, "gb200"): Rate(0.67, 0.58, f"{CUDNN_TABLES}/gb200_918: 1,686 and 1,441 of 2,500 TFLOP/s", 800.0),
    (CUDNN, "gb300"): Rate(0.81, 0.62, f"{CUDNN_TABLES}/gb300_918: 2,031 and 1,552 of 2,500 TFLOP/s", 800.0),
    (SPLASH, "tpu"): Rate(0.55, 0.39, SPLASH_ESTIMATE),
}

GENERATIONS = {
    "h200": ("h100",),
    "b200": ("h100",),
    "gb200": ("b200", "h100"),
    "b300": ("gb300", "b200", "h100"),
    "gb300": ("b200", "h100"),
}
"""The chips whose rates replace those of a chip that has none, the nearest architecture first; of others, the A100's.

Source: an estimate.
"""

HEAD = 128.0
HEAD_POWER = 0.3
"""Narrower heads have more exponentials per FLOP. Source: arXiv 2407.08608, figure 5: 77 % with 64."""


def kernel_on(chip: Chip) -> str:
    """Returns the kernel that Spanax runs on a chip.

    Example:
      >>> from spanax.hardware.chips import chip_named
      >>> kernel_on(chip_named("v5p")), kernel_on(chip_named("h100"))
      ('splash', 'cudnn')
    """
    return SPLASH if chip.inside is not None and chip.inside.kind == "torus" else CUDNN


def rate_of(kernel: str, chip: Chip) -> Rate:
    """Returns the rate of a kernel on a chip, or the estimate that replaces it, which its source states.

    Example:
      >>> from spanax.hardware.chips import chip_named
      >>> rate_of("cudnn", chip_named("h100")).forward, rate_of("cudnn", chip_named("b300")).source
      (0.55, "an estimate: the gb300's")
    """
    family = chip.name.split("-")[0]
    if kernel == SPLASH:
        return RATES[SPLASH, "tpu"]
    if (kernel, family) in RATES:
        return RATES[kernel, family]
    others = (*GENERATIONS.get(family, ()), *(other for name, other in RATES if name == kernel))
    like = next(other for other in others if (kernel, other) in RATES)
    return replace(RATES[kernel, like], source=f"an estimate: the {like}'s")


def attention_flops_per_second(kernel: str, chip: Chip, head_dim: Any, length: Any) -> Any:
    """Computes the FLOP/s of a forward and a backward pass; head sizes and numbers of keys may be arrays.

    A TPU multiplies tiles of `Chip.tile` channels, of which a narrow head fills a part.

    Example:
      >>> from spanax.hardware.chips import chip_named
      >>> long, short = (attention_flops_per_second("cudnn", chip_named("h100"), 128, size) for size in (1 << 17, 512))
      >>> round(long / 1e12), round(short / 1e12)
      (491, 300)
    """
    peak = chip.peak_flops.get("bf16", chip.peak_flops.get("fp16", max(chip.peak_flops.values())))
    narrow = head_dim / chip.tile if kernel == SPLASH else (head_dim / HEAD) ** HEAD_POWER
    rate = rate_of(kernel, chip)
    return peak * rate.both * length / (length + rate.half_length) * np.minimum(narrow, 1.0)


VECTOR_SHARE = 0.5
"""The share of the vector units' peak that a depthwise convolution achieves. Source: an estimate: no public table."""

VECTOR_OVER_MATRIX = 1 / 16
"""Peak of the vector units over that of 16-bit matmuls where a chip's is unknown. Source: the A100's, 19.5 of 312."""


def vector_rate_of(chip: Chip) -> tuple[float, str]:
    """Returns the FLOP/s of products without tensor cores, and its source.

    Example:
      >>> from spanax.hardware.chips import chip_named
      >>> rate, source = vector_rate_of(chip_named("a100"))
      >>> round(rate / 1e12, 2), vector_rate_of(chip_named("mi300x"))[1]
      (9.75, "an estimate: the a100's share of the peak of matmuls")
    """
    if chip.vector_flops_per_second is not None:
        return VECTOR_SHARE * chip.vector_flops_per_second, chip.sources.get("vector_flops_per_second", "")
    peak = chip.peak_flops.get("bf16", max(chip.peak_flops.values()))
    return VECTOR_SHARE * VECTOR_OVER_MATRIX * peak, "an estimate: the a100's share of the peak of matmuls"
