"""The incremental forms that a forward pass may have, from the one that leaves out most."""

from collections.abc import Callable, Mapping

from spanax.decoding.derive.bands import bands, rings_of
from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.incremental import Shortcuts, incremental
from spanax.decoding.derive.regions import regions
from spanax.decoding.derive.sequences import Incremental
from spanax.trace.jaxpr.graph import Op

MOST_POSITIONS = 2048
"""Masks of at most so many positions are evaluated: their bytes grow with the square."""


def candidates(forward: Forward, resized: Callable[[int], Forward | None]) -> list[Incremental]:
    """Returns incremental forms, which `prove` accepts or rejects; the last one takes no shortcut.

    Args:
      forward: the forward pass.
      resized: returns the forward pass of another number of tokens; None if the model has none.
    """
    plain = Incremental(forward, incremental(forward, Shortcuts()))
    alone = regions(forward, plain.steps, resized) if plain.recomputed() else {}
    masked = _bands(forward, resized)
    short = resized(max(masked.values())) if masked else None
    rings = None if short is None else rings_of(forward, short, masked)
    shortcuts = [Shortcuts(alone, rings)] if alone or rings is not None else []
    if alone and rings is not None:
        shortcuts += [Shortcuts(alone), Shortcuts(rings=rings)]
    return [*(Incremental(forward, incremental(forward, each)) for each in shortcuts), plain]


def _bands(forward: Forward, resized: Callable[[int], Forward | None]) -> Mapping[Op, int]:
    """Returns the `bands` of a forward pass; those of a long one by the corresponding operations of a shorter one."""
    if forward.length <= MOST_POSITIONS:
        return bands(forward)
    short = resized(MOST_POSITIONS)
    found = {} if short is None else bands(short)
    pairs = [] if short is None else zip(forward.graph.ops(), short.graph.ops(), strict=False)
    return {op: found[other] for op, other in pairs if other in found}
