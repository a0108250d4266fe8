"""Alike: whether peers did the same work; the times of those that did not are no comparison."""

from collections.abc import Mapping
from typing import Any

LOSS_TOLERANCE, FLOPS_TOLERANCE = 2e-3, 0.01
"""Relative: of the loss of any step, for sums in another order; of the FLOPs of all matmuls in a step."""


def differences(peers: Mapping[str, Mapping[str, Any]], loss_tolerance: float = LOSS_TOLERANCE) -> dict[str, str]:
    """In what peers did not do the same work as the first of them, by their names.

    Args:
      peers: by name, each with its `parameters`, `tokens`, `flops` and the `losses` of its steps.
      loss_tolerance: relative, of the loss of any step.
    """
    first = next(iter(peers.values()))
    found = {name: "; ".join(_differs(peer, first, loss_tolerance)) for name, peer in peers.items()}
    return {name: what for name, what in found.items() if what}


def _differs(peer: Mapping[str, Any], first: Mapping[str, Any], loss_tolerance: float) -> list[str]:
    found = [
        f"{peer[what]:,} {what}, not {first[what]:,}" for what in ("parameters", "tokens") if peer[what] != first[what]
    ]
    if not abs(peer["flops"] / first["flops"] - 1) <= FLOPS_TOLERANCE:
        found.append(f"{peer['flops']:.4g} FLOPs a step, not {first['flops']:.4g}")
    for step, (mine, wanted) in enumerate(zip(peer["losses"], first["losses"], strict=True), start=1):
        if not abs(mine - wanted) <= loss_tolerance * abs(wanted):
            return [*found, f"loss {mine:.5f} in step {step}, not {wanted:.5f}"]
    return found
