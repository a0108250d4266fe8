"""Enumerates pipeline schedules and numbers of microbatches on every mesh of a family."""

import functools

import numpy as np

from spanax.plan.cost.step_time import Grid
from spanax.plan.space import AXES, Family

SCHEDULES = ("1f1b", "interleaved")


def grids_of(
    family: Family, batch_size: int, traced_batch: int, microbatches: int | None, num_layers: int
) -> list[Grid]:
    """Returns a grid per schedule: every mesh of a family with every possible number of microbatches."""
    num_shards = family.sizes[[AXES.index(axis) for axis in ("data", "fsdp", "expert")]].prod(0)
    grids = []
    for schedule in SCHEDULES:
        num_chunks = 2 if schedule == "interleaved" else 1
        pairs = [
            (column, count)
            for column, (stages, shards) in enumerate(zip(family.num_stages, num_shards, strict=True))
            if (stages > 1 or schedule == "1f1b") and (num_chunks == 1 or num_layers >= stages * num_chunks)
            for count in _microbatches(batch_size // int(shards), int(stages), schedule)
            if microbatches in (None, count)
        ]
        if pairs:
            columns, counts = np.asarray(pairs).T
            scale = batch_size / counts / traced_batch
            sizes, stages = family.sizes[:, columns], family.num_stages[columns]
            grids.append(Grid(sizes, stages, counts, scale, schedule, num_chunks, num_layers))
    return grids


@functools.cache
def _microbatches(per_device: int, stages: int, schedule: str) -> list[int]:
    """Returns powers of two and one example per microbatch; a pipeline needs at least one microbatch per stage."""
    counts = {1 << power for power in range(per_device.bit_length()) if per_device % (1 << power) == 0} | {per_device}
    return sorted(c for c in counts if stages == 1 or (c >= stages and (schedule != "interleaved" or c % stages == 0)))
