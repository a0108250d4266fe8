"""Ranks: among runs of one model, batch and number of devices, is the plan priced lowest the fastest measured?"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from published.cases import Case

AT_LEAST = 4
"""Fewer plans to choose from are no choice: with three, the first three hold the best whatever they are."""


@dataclass(frozen=True)
class Ranks:
    """Over all groups: how much slower the first choice is than the best, and how often it is among the first three.

    `ratio_error` is the median error of the predicted ratio of two plans of a group, as a fraction.
    """

    groups: int
    plans: int
    median_regret: float
    mean_regret: float
    worst_regret: float
    first_is_best: float
    top3_holds_best: float
    top3_median_regret: float
    top3_worst_regret: float
    ratio_error: float


def ranks(cases: Sequence[Case], predicted: np.ndarray) -> Ranks | None:
    """Compare orders by predicted and by measured time; None where no group has enough plans."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        row = case.row
        shape = (row.num_layers, row.embed_dim, row.num_heads, row.mlp_dim, row.seq_len)
        job = (row.num_devices, row.batch, case.cluster.chip.name, row.text.get("precision"))
        groups[row.file, shape, job].append(index)
    regrets, firsts, among, errors = [], [], [], []
    count = 0
    for indices in groups.values():
        plans = {(cases[index].sizes, cases[index].row.stages, cases[index].num_microbatches) for index in indices}
        if len(plans) < AT_LEAST:
            continue
        count += len(indices)
        measured = np.asarray([cases[index].measured_seconds for index in indices])
        factors = measured / predicted[indices]
        errors += [max(a / b, b / a) - 1 for a, b in itertools.combinations(factors, 2)]
        order = np.argsort(predicted[indices], kind="stable")
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
        ratio_error=float(np.median(errors)),
    )
