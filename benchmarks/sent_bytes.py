"""What a device sends for the collectives of a compiled program, each around a ring."""

from collections.abc import Callable

from spanax.check.hlo.collectives import Collective

SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}
"""What a device sends of a collective's result around a ring of so many."""


def sent_bytes(move: Collective) -> float:
    """Returns the bytes that a device sends per step. Source: as in `hardware/collectives.py`."""
    return move.num_bytes * SENT[move.kind](move.group_size)
