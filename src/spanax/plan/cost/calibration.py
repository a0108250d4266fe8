"""Assumptions of the cost model that no data sheet states."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """What no data sheet says: fitted once, for all chips and models.

    Attributes:
      idle_rounds: what the last, partly filled round of tiles costs, in rounds.
      first_products: each tile takes as long as if it summed over so many products more: filling its pipeline.
      score_products: the same of attention scores, and of what is made of them, outside of a fused kernel.
      touched: the share of a fused kernel's bytes that really go to memory.
      touched_around: how many times as much is touched around the layers, in the loss above all: 1 for a compiled step.
      attention: the rate of a fused attention kernel over that of a matmul.
      start: what is seen in a step of the start of a kernel or a collective, where the next waits in line already.
      dispatch_seconds: per kernel, on the host, where operations are dispatched one by one: 0 for a compiled step.
      repeats_forward: whether the backward pass repeats all of the layers' forward pass, as checkpoints do where no
        compiler drops what nobody reads; the program is then one that keeps everything.
      gathers_again: whether the repeated pass gathers the weights a time of its own.
      fused_attention: whether attention scores stay on the chip.
      causal_share: the share of the scores that a fused kernel works out.

    Source: `python benchmarks/plan_accuracy.py --fit`: every second row of the vTrain, llm-foundry and MaxText files.
    They are fitted as well with 0 to 300 `first_products`; `xla/service/gpu/model/default_matmul_perf_table.txtpb`
    (openxla/xla @336bb15, B200) wants 250 to 400 of small matmuls. What was fitted to nothing is left out: that gathers
    of weights and sums of gradients hide behind computation.
    """

    idle_rounds: float = 0.483
    first_products: float = 200.0
    score_products: float = 506.0
    touched: float = 0.865
    touched_around: float = 1.0
    attention: float = 0.313
    start: float = 0.618
    dispatch_seconds: float = 0.0
    repeats_forward: bool = False
    gathers_again: bool = False
    fused_attention: bool = False
    causal_share: float = 1.0
