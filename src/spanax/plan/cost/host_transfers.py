"""The time of copies between the memory of the devices and of the host."""

from collections.abc import Mapping

import numpy as np

from spanax.hardware.chip import Chip
from spanax.plan.spmd.terms import HostCopies
from spanax.trace.analysis.op_groups import Phase

Array = np.ndarray

HOST_TRANSFERS = "host transfers"
"""The term of the step time: copies of offloaded state and activations that nothing hides."""


def exposed_copies(
    copies: HostCopies, num_shards: Array, scale: Array, computing: Mapping[tuple[int, bool], Array], chip: Chip
) -> dict[str, Array]:
    """Returns the seconds of one microbatch, in all layers, in which copies of activations exceed the computation.

    The forward pass hides copies to the host, the backward pass those from it: layers copy while others compute.
    The result is empty without copies, and on simulated devices, whose memory is that of the host.
    """
    if chip.shared or not copies.num_bytes.size:
        return {}
    num_bytes = copies.num_bytes[:, None] * np.where(copies.batched[:, None], scale, 1.0) / num_shards[copies.axes]
    seconds = np.zeros(scale.shape)
    for phase, rows in ((Phase.FORWARD, copies.to_host), (Phase.BACKWARD, ~copies.to_host)):
        seconds += np.maximum(chip.host_seconds(num_bytes[rows].sum(0)) - computing[phase, True], 0.0)
    return {HOST_TRANSFERS: seconds}
