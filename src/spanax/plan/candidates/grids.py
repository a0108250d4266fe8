"""Enumerates pipeline schedules and numbers of microbatches on every mesh of a family."""

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from spanax.hardware.torus import divisors
from spanax.plan.cost.step_time import Grid
from spanax.plan.space import AXES, Family

PLAIN = "1f1b"
INTERLEAVED = "interleaved"
ZERO_BUBBLE = "zero-bubble"

SCHEDULES = (PLAIN, INTERLEAVED, ZERO_BUBBLE)

CONTIGUOUS = (PLAIN, ZERO_BUBBLE)
"""The schedules whose stages have consecutive layers."""

MOST_CHUNKS = 8
"""The most chunks per stage that a search prices: hops grow with chunks, and the bubble is then at most an eighth."""


@dataclass(frozen=True, eq=False)
class Grids:
    """The candidates of a family under every schedule.

    Attributes:
      plain: every mesh with every possible number of microbatches; in stages, under one schedule.
      others: candidates of `plain` under another schedule, with their columns in `plain`. The layers are partitioned as
        in `plain`, so that only the bubble, the hops and the activations in flight differ.
    """

    plain: Grid
    others: tuple[tuple[Grid, np.ndarray], ...]

    @property
    def size(self) -> int:
        """The number of candidates under all schedules."""
        return self.plain.scale.size + sum(columns.size for _, columns in self.others)

    def select(self, chosen: np.ndarray) -> "Grids | None":
        """Returns the chosen candidates of `plain`, a mask, under every schedule; None for no candidate."""
        if chosen.all():
            return self
        if not chosen.any():
            return None
        places = np.cumsum(chosen) - 1
        others = [
            (grid.select(np.flatnonzero(chosen[columns])), columns[chosen[columns]]) for grid, columns in self.others
        ]
        others = [(grid, places[columns]) for grid, columns in others if columns.size]
        return Grids(self.plain.select(np.flatnonzero(chosen)), tuple(others))


def grids_of(
    family: Family,
    batch_size: int,
    traced_batch: int,
    microbatches: int | None,
    num_layers: int,
    schedules: Collection[str] = SCHEDULES,
    always: tuple[str, int] = (PLAIN, 1),
) -> Grids | None:
    """Returns every mesh of a family with every possible number of microbatches and schedule; None for no candidate.

    `schedules` are those to price in addition to `always`, a schedule with its chunks per stage.
    """
    num_shards = family.sizes[[AXES.index(axis) for axis in ("data", "fsdp", "expert")]].prod(0)
    pairs = [
        (column, count)
        for column, (stages, shards) in enumerate(zip(family.num_stages, num_shards, strict=True))
        for count in _microbatches(batch_size // int(shards), int(stages))
        if microbatches in (None, count) and _can_run(always, int(stages), count, num_layers)
    ]
    if not pairs:
        return None
    columns, counts = np.asarray(pairs).T
    scale = batch_size / counts / traced_batch
    plain = Grid(family.sizes[:, columns], family.num_stages[columns], counts, scale, *always, num_layers)
    in_stages = np.flatnonzero(plain.num_stages > 1)
    others = []
    if in_stages.size and ZERO_BUBBLE in schedules:
        others.append((replace(plain.select(in_stages), schedule=ZERO_BUBBLE), in_stages))
    stages = plain.num_stages[in_stages]
    whole_groups = in_stages[plain.num_microbatches[in_stages] % stages == 0]
    for num_chunks in range(2, MOST_CHUNKS + 1) if INTERLEAVED in schedules else ():
        divisible = [count for count in np.unique(stages).tolist() if num_chunks in chunks_of(num_layers, count)]
        chosen = whole_groups[np.isin(plain.num_stages[whole_groups], divisible)]
        if chosen.size:
            others.append((replace(plain.select(chosen), schedule=INTERLEAVED, num_chunks=num_chunks), chosen))
    return Grids(plain, tuple(others))


@functools.cache
def chunks_of(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns the numbers of chunks per stage with no more padding than one chunk has.

    Example:
      >>> chunks_of(96, 8), chunks_of(126, 16)
      ((2, 3, 4, 6), (2, 4))
    """
    rows = -(-num_layers // num_stages)
    return tuple(n for n in divisors(rows) if 1 < n <= MOST_CHUNKS and num_stages * n <= num_layers)


def _can_run(always: tuple[str, int], num_stages: int, num_microbatches: int, num_layers: int) -> bool:
    """Returns whether a schedule with its chunks per stage supports these counts."""
    schedule, num_chunks = always
    is_grouped = num_microbatches % num_stages == 0 and num_stages * num_chunks <= num_layers
    return schedule != INTERLEAVED or num_stages == 1 or is_grouped


@functools.cache
def _microbatches(per_device: int, stages: int) -> list[int]:
    """Returns powers of two and one example per microbatch; a pipeline needs at least one microbatch per stage."""
    counts = {1 << power for power in range(per_device.bit_length()) if per_device % (1 << power) == 0} | {per_device}
    return sorted(count for count in counts if count >= stages or stages == 1)
