"""The rate of attention kernels, by kernel and chip generation, from published tables."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from spanax.hardware.chip import Chip

CUDNN, SPLASH, FLASH, FLASH2, FLASH3 = "cudnn", "splash", "flash", "flash2", "flash3"
"""The kernels: cuDNN's, JAX's on TPUs, and three generations of FlashAttention."""


@dataclass(frozen=True)
class Rate:
    """FLOP/s over the chip's 16-bit peak for long sequences and heads of 128, forward and backward pass.

    Masked scores are not counted. Backward passes were measured without a mask, which is worth
    a few percent. `source` states where it was measured, or which estimate replaces a measurement.
    """

    forward: float
    backward: float
    source: str

    @property
    def both(self) -> float:
        """The rate of a forward and a backward pass, which has five matmuls to its two."""
        return 7.0 / (2.0 / self.forward + 5.0 / self.backward)


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
    (CUDNN, "b200"): Rate(0.55, 0.48, "an estimate: the H100's share of the peak"),
    (SPLASH, "tpu"): Rate(0.55, 0.45, "an estimate: no public table"),
}

GENERATIONS = {
    "v100": "a100", "l4": "a100", "h200": "h100", "gb200": "b200", "b300": "b200", "gb300": "b200", "mi300x": "a100"
}  # fmt: skip
"""The generation whose rates replace those of a chip that has none. Source: an estimate, the nearest architecture."""

HALF_LENGTH = 330.0
"""Causal sequences of this length run at half the rate: blocks on the diagonal are masked in part.

Source: arXiv 2407.08608, figure 5: cuDNN has 315, 410, 484, 518 and 539 TFLOP/s for 512, 1k, 2k, 4k and 16k keys.
"""

HEAD, HEAD_POWER = 128.0, 0.3
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
      >>> rate_of("cudnn", chip_named("h100")).forward, rate_of("cudnn", chip_named("h200")).source
      (0.55, "an estimate: the h100's")
    """
    family = chip.name.split("-")[0]
    if kernel == SPLASH:
        return RATES[SPLASH, "tpu"]
    if (kernel, family) in RATES:
        return RATES[kernel, family]
    like = GENERATIONS.get(family, family)
    like = like if (kernel, like) in RATES else next(other for name, other in RATES if name == kernel)
    known = RATES[kernel, like]
    return Rate(known.forward, known.backward, f"an estimate: the {like}'s")


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
    rate = peak * rate_of(kernel, chip).both * length / (length + HALF_LENGTH)
    return rate * np.minimum(narrow, 1.0)
