"""The work of experts: grouped kernels, and the device whose experts have the most tokens."""

from dataclasses import replace

import numpy as np

from spanax.plan.cost.calibration import Assumptions
from spanax.plan.spmd.terms import KINDS, Matmuls, Terms

SENT = KINDS.index("all-to-all")
"""The collective that sends tokens to experts and back."""


def grouped(terms: Terms) -> Terms:
    """Returns the terms with kernels for ragged matmuls: each row is multiplied by the matrix of its own group only.

    A group has its share of the rows, and tiles of its own: the fewer rows, the more of a tile is padding. Where the
    rows are contracted, each group sums over its share.

    Source: Gale et al., "MegaBlocks", 2022 (arXiv 2211.15841), section 4; a tile belongs to one expert.
    """
    matmuls = terms.matmuls
    is_ragged = np.arange(4)[None, :] == matmuls.ragged[:, None]
    sizes = np.where(is_ragged, matmuls.sizes / matmuls.groups[:, None], matmuls.sizes)
    return replace(terms, matmuls=replace(matmuls, flops=matmuls.flops / matmuls.groups, sizes=sizes))


def matmul_loads(matmuls: Matmuls, num_shards: np.ndarray, assumptions: Assumptions) -> np.ndarray:
    """Returns the work of the busiest device over the mean: one row per matmul, one column per mesh."""
    return np.where(num_shards[matmuls.expert_axes] > 1, assumptions.imbalance, 1.0)


def collective_load(terms: Terms, kind: int, over: int, assumptions: Assumptions) -> float:
    """Returns the bytes that the busiest device sends to experts over the mean; 1 for any other collective."""
    axes = int(np.bitwise_or.reduce(terms.matmuls.expert_axes, initial=0))
    return assumptions.imbalance if kind == SENT and over & axes else 1.0
