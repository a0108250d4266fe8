"""Assumptions of the cost model that no data sheet states."""

from dataclasses import dataclass

from spanax.errors import RangeError
from spanax.plan.cost.overlap import Overlap


@dataclass(frozen=True)
class Assumptions:
    """Constants that no data sheet states, fitted once for all chips and models.

    Attributes:
      idle_rounds: the cost of the last, partly filled wave of tiles, in waves.
      first_products: each tile takes as long as if it summed over this many more products: filling its pipeline.
      score_products: the same for attention scores and values computed from them, outside a fused kernel.
      touched: the share of a fused kernel's bytes that reach memory.
      touched_around: a factor on the bytes outside the layers, mostly in the loss: 1 for a compiled step.
      attention: the kernel of fused attention, of `kernel_rates.RATES`; None for the one that Spanax runs on the chip.
      start: the visible share of a kernel's or collective's start, where the next is already queued.
      dispatch_seconds: per fused kernel, on the host, where operations run one by one: 0 for a compiled step.
      repeats_forward: the share of the layers' forward pass that the backward pass repeats, 1 for checkpoints where no
        compiler removes dead code; the program is then one without remat.
      gathers_again: whether the repeated pass gathers the weights once more.
      fused_attention: whether attention scores stay on the chip.
      causal_share: the share of the scores that a fused kernel computes.
      cast: the time of a cast of activations or gradients to eight or four bits, as the bytes it moves over the
        operand's 16-bit bytes: 0 where the program itself casts.
      overlap: what the runtime hides behind computation; None for that of the program that Spanax compiles.
      grouped_matmul: whether a kernel multiplies each row of a ragged matmul by the matrix of its own group only; XLA
        multiplies every row by all of them.
      imbalance: the tokens of the experts on the busiest device over the mean of all devices, where experts are
        sharded. Not fitted: 1 is the uniform load that Megatron-Core's benchmarks force
        (`--moe-router-force-load-balancing`); a router without it is above.

    Source: `python benchmarks/plan_accuracy.py --fit`, on all published runs; --leave-one-out predicts each source by
    constants that were fitted without it.
    The fit is equally good with 0 to 300 `first_products`; `xla/service/gpu/model/default_matmul_perf_table.txtpb`
    (openxla/xla @336bb15, B200) suggests 250 to 400 for small matmuls.
    """

    idle_rounds: float = 0.63
    first_products: float = 200.0
    score_products: float = 296.0
    touched: float = 0.82
    touched_around: float = 1.0
    attention: str | None = None
    start: float = 0.546
    dispatch_seconds: float = 0.0
    repeats_forward: float = 0.0
    gathers_again: bool = False
    fused_attention: bool = False
    causal_share: float = 1.0
    cast: float = 0.0
    overlap: Overlap | None = None
    grouped_matmul: bool = False
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if not self.imbalance >= 1:
            raise RangeError(
                f"imbalance is {self.imbalance}; the busiest device has at least the mean.", fix="1 or more"
            )
