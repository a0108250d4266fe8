"""The planner's prices of published runs, as the search computes them: `spanax.plan.cost.step_time.price`."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from published.cases import Case
from published.constants import CONSTANTS, defaults
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.step_time import Costs, Grid, price, repeated
from spanax.plan.space import AXES

PART_SECONDS = 15e-6
"""Of each device's part of an array that DeepSpeed's ZeRO-3 gathers or scatters: a list with one tensor a device.

Source: 10 us for PyTorch to dispatch a copy, and 4.7 us a step of NCCL's ring with 8 devices a node (tuning.cc).
"""

REPEATED = {"": 0.0, "half": 0.5, "all": 1.0}
"""The share of the forward pass that the backward pass repeats."""

CASTS = (
    (r"fp4", 4.1, 4.1), (r"mxfp8|fp8-mx", 2.8, 2.8), (r"delayed|\bte fp8", 2.0, 1.5), (r"fp8|float8", 3.2, 3.5),
)  # fmt: skip
"""Casts of activations and gradients by recipe, as bytes moved over 16-bit bytes: on Hopper, and on Blackwell.

Current scaling, unless the precision states delayed or block scaling; Transformer Engine's own default is delayed.

Source: NVIDIA/TransformerEngine @8f2e635, docs/examples/gemm_profiling: the matmuls of a layer of width 4096 with and
without casts of both operands (2.48 G elements), on a B300 in eight bits 9.15 and 6.81 ms (current), 7.80 (delayed),
8.98 and 7.16 (MXFP8), in four 6.45 and 3.76 ms; on an H200 20.3 and 16.8 ms (current), 19.0 (delayed); over the rate of
the memory. A delayed scale moves 4 bytes for 2 on Hopper, which also transposes, and 3 on Blackwell.
"""

PERSISTENT_BYTES = 1e6
"""DeepSpeed gathers no smaller arrays. Source: its documentation, stage3_param_persistence_threshold."""


class Prices:
    """Prices of many cases for any values of the constants; cases that differ in degrees and batch are priced at once.

    Args:
      cases: in the order of the seconds that `seconds` returns.
    """

    def __init__(self, cases: Sequence[Case]):
        self.cases = list(cases)
        together: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, case in enumerate(cases):
            alike = (id(case.terms), case.cluster, case.row.chunks, case.runtime, case.redone, case.gathers_again)
            together[alike].append(index)
        self._groups = [np.asarray(indices) for indices in together.values()]
        self._listed = np.asarray([listed_seconds(case) for case in cases])

    def seconds(self, values: Mapping[str, float] | None = None, cases: np.ndarray | None = None) -> np.ndarray:
        """Returns seconds of a step of every case; NaN for those that the mask `cases` leaves out."""
        values = defaults() | dict(values or {})
        seconds = np.full(len(self.cases), np.nan)
        for indices in self._groups:
            chosen = indices if cases is None else indices[cases[indices]]
            if chosen.size:
                alike = [self.cases[index] for index in chosen]
                seconds[chosen] = priced(alike, values).step_seconds + self._listed[chosen]
        return seconds


def priced(alike: Sequence[Case], values: Mapping[str, float]) -> Costs:
    """Returns the costs of cases with the same terms, machine and software, each with its own degrees and batch."""
    first = alike[0]
    sizes = [dict(zip(AXES, case.sizes, strict=True)) for case in alike]
    shares = {c.field: values[c.name] for c in CONSTANTS if first.cluster.chip.name in c.chips}
    machine = replace(first.cluster, chip=replace(first.cluster.chip, **shares)) if shares else first.cluster
    grid = Grid(
        sizes=np.asarray([[float(each[axis]) for each in sizes] for axis in first.terms.axes]).reshape(-1, len(alike)),
        num_stages=np.asarray([case.row.stages for case in alike]),
        num_microbatches=np.asarray([case.num_microbatches for case in alike]),
        scale=np.asarray([case.scale for case in alike]),
        schedule="interleaved" if first.row.chunks > 1 else "1f1b",
        num_chunks=first.row.chunks,
    )
    return price(first.terms, machine, grid, assumptions_of(first, values))


def assumptions_of(case: Case, values: Mapping[str, float]) -> Assumptions:
    """Returns what is assumed of a run: fitted constants, and what follows from the features of its software."""
    fitted = {c.field: values[c.name] for c in CONSTANTS if c.applies_to(case.runtime)}
    return replace(
        Assumptions(),
        **fitted,
        repeats_forward=REPEATED[case.redone],
        gathers_again=case.gathers_again,
        fused_attention=case.runtime.fused_attention,
        causal_share=0.5 if case.runtime.fused_attention else 1.0,
        overlap=case.runtime.overlap,
        attention=case.runtime.attention or None,
        cast=cast_of(case),
    )


def cast_of(case: Case) -> float:
    """Returns the bytes that a cast of activations or gradients moves over their 16-bit bytes; 0 without casts."""
    stated = case.row.text.get("precision", "").lower()
    is_blackwell = "fp4" in case.cluster.chip.peak_flops
    return next((casts[is_blackwell] for words, *casts in CASTS if re.search(words, stated)), 0.0)


def listed_seconds(case: Case) -> float:
    """Returns what DeepSpeed's ZeRO-3 takes beyond the bytes: each array is sent as a list with one tensor a device."""
    if not case.gathers_again:
        return 0.0
    moves = (repeated(case.terms, True) if case.redone == "all" else case.terms).collectives
    runs = moves.runs[moves.of_weights & (moves.num_bytes >= PERSISTENT_BYTES)].sum()
    return float(runs * case.num_microbatches * case.sizes[1] * PART_SECONDS)
