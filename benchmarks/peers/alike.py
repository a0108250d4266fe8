"""Alike: whether peers did the same work; the times of those that did not are no comparison."""

from collections.abc import Mapping
from typing import Any

LOSS_TOLERANCE, FLOPS_TOLERANCE = 2e-3, 0.01
"""Relative: of the loss of any step, for sums in another order; of the FLOPs of all matmuls in a step."""


def differences(peers: Mapping[str, Mapping[str, Any]], loss_tolerance: float = LOSS_TOLERANCE) -> list[str]:
    """In what peers did not do the same work as the first of them.

    Args:
      peers: by name, each with its `parameters`, `tokens`, `flops` and the `losses` of its steps.
      loss_tolerance: relative, of the loss of any step.
    """
    first, found = next(iter(peers.values())), []
    for name, peer in peers.items():
        for what in ("parameters", "tokens"):
            if peer[what] != first[what]:
                found.append(f"{name}: {peer[what]:,} {what}, not {first[what]:,}")
        if not abs(peer["flops"] / first["flops"] - 1) <= FLOPS_TOLERANCE:
            found.append(f"{name}: {peer['flops']:.4g} FLOPs a step, not {first['flops']:.4g}")
        for step, (mine, wanted) in enumerate(zip(peer["losses"], first["losses"], strict=True), start=1):
            if not abs(mine - wanted) <= loss_tolerance * abs(wanted):
                found.append(f"{name}: loss {mine:.5f} in step {step}, not {wanted:.5f}")
                break
    return found
