"""The cost of each collective in seconds, from its bytes and the link between its devices."""

from typing import Any, Literal

import numpy as np

from spanax.hardware.links import AxisLink

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]


def collective_seconds(kind: Collective, num_bytes: Any, link: AxisLink) -> Any:
    """Computes the seconds of a collective over a link (`axis_link`); 0 over a single device.

    With n devices, and the rate of the link for the kind:

    - all_gather, reduce_scatter: start + (n - 1) (bytes / n / rate + latency), for a ring of n - 1 steps.
    - all_reduce: the faster of a ring, start + 2 (n - 1) (bytes / n / rate + latency), and a tree,
      start + 2 (bytes / rate + latency of the tree), a reduction and a broadcast.
    - all_to_all: start + (n - 1) / n bytes / rate + latency to the farthest device.
    - permute, between neighbors: start + bytes / rate + latency.

    Args:
      kind: the collective.
      num_bytes: the size of the unsharded (gathered) array for all_gather, reduce_scatter and all_reduce, and the bytes
        per device for all_to_all and permute; a number or a NumPy array.
      link: the link, whose numbers may be arrays.

    Source: the ring, Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009),
    as in NCCL and XLA; the tree, Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan" (2009). NCCL also selects the faster one.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> from spanax.hardware.links import axis_link
      >>> from spanax.hardware.mesh import MeshShape
      >>> link = axis_link(cluster("a100-80gb:8"), MeshShape.of("data=8"), "data")
      >>> f"{collective_seconds('all_reduce', 2**30, link) * 1e3:.1f} ms; measured: 8.2 ms"
      '8.3 ms; measured: 8.2 ms'
    """
    n = link.size
    steps = n - 1
    if kind == "all_gather" or kind == "reduce_scatter":
        seconds = link.start_seconds + steps / n * num_bytes / link.bytes_per_second + steps * link.latency_seconds
    elif kind == "all_reduce":
        rate = link.all_reduce_bytes_per_second
        ring = 2 * steps * (num_bytes / n / rate + link.latency_seconds)
        tree = 2 * (num_bytes / rate + link.tree_latency_seconds)
        seconds = link.start_seconds + np.minimum(ring, tree)
    elif kind == "all_to_all":
        sent = steps / n * num_bytes / link.all_to_all_bytes_per_second
        seconds = link.start_seconds + sent + link.tree_latency_seconds
    else:
        seconds = link.start_seconds + num_bytes / link.permute_bytes_per_second + link.latency_seconds
    if np.ndim(seconds) or np.ndim(n):
        return np.where(np.asarray(n) > 1, seconds, 0.0)
    return float(seconds) if n > 1 else 0.0
