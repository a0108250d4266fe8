"""The incremental forms that a forward pass may have, from the one that leaves out most."""

from collections.abc import Callable

from spanax.decoding.derive.bands import bands, rings_of
from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.incremental import Shortcuts, incremental
from spanax.decoding.derive.regions import regions
from spanax.decoding.derive.sequences import Incremental


def candidates(forward: Forward, resized: Callable[[int], Forward | None]) -> list[Incremental]:
    """Returns incremental forms, which `prove` accepts or rejects; the last one takes no shortcut.

    Args:
      forward: the forward pass.
      resized: returns the forward pass of another number of tokens; None if the model has none.
    """
    plain = Incremental(forward, incremental(forward, Shortcuts()))
    alone = regions(forward, plain.steps, resized) if plain.recomputed() else {}
    masked = bands(forward)
    short = resized(max(masked.values())) if masked else None
    rings = None if short is None else rings_of(forward, short, masked)
    shortcuts = [Shortcuts(alone, rings)] if alone or rings is not None else []
    if alone and rings is not None:
        shortcuts += [Shortcuts(alone), Shortcuts(rings=rings)]
    return [*(Incremental(forward, incremental(forward, each)) for each in shortcuts), plain]
