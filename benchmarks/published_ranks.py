"""Rank: among runs of one model, batch and number of devices, is the plan priced lowest the fastest measured?"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from published_costs import Case

AT_LEAST = 4
"""Fewer plans to choose from are no choice: with three, the first three hold the best whatever they are."""


@dataclass(frozen=True)
class Ranks:
    """Over all groups: how much slower the first choice is than the best, and how often the first three hold it."""

    groups: int
    plans: int
    median_regret: float
    mean_regret: float
    worst_regret: float
    first_is_best: float
    top3_holds_best: float
    top3_median_regret: float
    top3_worst_regret: float


def ranks(cases: Sequence[Case], predicted: np.ndarray) -> Ranks | None:
    """Compare orders by predicted and by measured time; None where no group has enough plans."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, case in enumerate(cases):
        row = case.row
        shape = (row.num_layers, row.embed_dim, row.num_heads, row.mlp_dim, row.seq_len)
        groups[row.file, shape, row.num_devices, row.batch, case.cluster.chip.name, case.row.text["precision"]].append(
            at
        )
    regrets, firsts, among = [], [], []
    count = 0
    for places in groups.values():
        plans = {(cases[at].sizes, cases[at].row.stages, cases[at].num_microbatches) for at in places}
        if len(plans) < AT_LEAST:
            continue
        count += len(places)
        measured = np.asarray([cases[at].measured_seconds for at in places])
        order = np.argsort(predicted[places], kind="stable")
        regrets.append(measured[order[0]] / measured.min() - 1)
        among.append(measured[order[:3]].min() / measured.min() - 1)
        firsts.append(order[0] == measured.argmin())
    if not regrets:
        return None
    return Ranks(
        groups=len(regrets),
        plans=count,
        median_regret=float(np.median(regrets)),
        mean_regret=float(np.mean(regrets)),
        worst_regret=float(max(regrets)),
        first_is_best=float(np.mean(firsts)),
        top3_holds_best=float(np.mean(np.asarray(among) == 0.0)),
        top3_median_regret=float(np.median(among)),
        top3_worst_regret=float(max(among)),
    )
