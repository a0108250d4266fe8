"""The cost of each collective in seconds, from its bytes and the link between its devices.

`num_bytes` is the size of the unsharded (gathered) array for all_gather, reduce_scatter and all_reduce, and the bytes
per device for all_to_all and permute. `bytes_per_second` is unidirectional, per device. Arguments may be numbers or
NumPy arrays. A collective over a single device takes 0 seconds.
"""

from typing import Any, Literal

import numpy as np

from spanax.hardware.links import AxisLink

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]


def all_gather_seconds(
    num_bytes: Any, num_devices: Any, bytes_per_second: Any, latency_seconds: Any = 0.0, start_seconds: Any = 0.0
) -> Any:
    """Computes the seconds of a ring all-gather or reduce-scatter: start + (n - 1) (bytes / n / rate + latency).

    Every device forwards n - 1 shards around a ring, with `latency_seconds` per step.

    Source: the halves of the ring in Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations" (2009), as in NCCL and XLA.

    Example:
      >>> round(all_gather_seconds(2048 * 8192 * 2, 4, 45e9) * 1e6)
      559
    """
    sent = (num_devices - 1) / num_devices * num_bytes / bytes_per_second
    return _of_several(num_devices, start_seconds + sent + (num_devices - 1) * latency_seconds)


def all_reduce_seconds(
    num_bytes: Any,
    num_devices: Any,
    bytes_per_second: Any,
    latency_seconds: Any = 0.0,
    start_seconds: Any = 0.0,
    tree_seconds: Any = None,
) -> Any:
    """Computes the seconds of an all-reduce: the faster of a ring and a tree.

    ring: start + 2 (n - 1) (bytes / n / rate + latency), a reduce_scatter and an all_gather.
    tree: start + 2 (bytes / rate + latency), a reduction and a broadcast; `tree_seconds` is the latency of the tree,
    by default ceil(log2 n) times `latency_seconds`.

    Source: the ring as for `all_gather_seconds`; the tree, Sanders, Speck and Traeff, "Two-tree algorithms for full
    bandwidth broadcast, reduction and scan" (2009). NCCL also selects the faster one.

    Example:
      >>> all_reduce_seconds(8e9, 8, 100e9), round(all_reduce_seconds(8, 8, 100e9, 1e-6) * 1e6, 3)
      (0.14, 6.0)
    """
    latency = np.ceil(np.log2(num_devices)) * latency_seconds if tree_seconds is None else tree_seconds
    ring = 2 * (num_devices - 1) * (num_bytes / num_devices / bytes_per_second + latency_seconds)
    tree = 2 * (num_bytes / bytes_per_second + latency)
    fastest = np.minimum(ring, tree) if isinstance(ring - tree, np.ndarray) else float(min(ring, tree))
    return _of_several(num_devices, start_seconds + fastest)


def all_to_all_seconds(
    num_bytes: Any, num_devices: Any, bytes_per_second: Any, latency_seconds: Any = 0.0, start_seconds: Any = 0.0
) -> Any:
    """Computes the seconds of an all-to-all: start + (n - 1) / n bytes / rate + latency.

    `num_bytes` is per device, and `latency_seconds` is to the farthest device. On a torus the rate is limited by the
    bisection: `AxisLink.all_to_all_bytes_per_second`.

    Source: each device sends n - 1 of its n parts concurrently.

    Example:
      >>> all_to_all_seconds(8e9, 8, 100e9)
      0.07
    """
    sent = (num_devices - 1) / num_devices * num_bytes / bytes_per_second
    return _of_several(num_devices, start_seconds + sent + latency_seconds)


def permute_seconds(
    num_bytes: Any, num_devices: Any, bytes_per_second: Any, latency_seconds: Any = 0.0, start_seconds: Any = 0.0
) -> Any:
    """Computes the seconds of a permutation between neighbors: start + bytes / rate + latency.

    Source: each device sends its array once.

    Example:
      >>> permute_seconds(8e9, 8, 100e9)
      0.08
    """
    return _of_several(num_devices, start_seconds + num_bytes / bytes_per_second + latency_seconds)


def collective_seconds(kind: Collective, num_bytes: Any, link: AxisLink) -> Any:
    """Computes the seconds of a collective over a link (`axis_link`).

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> from spanax.hardware.links import axis_link
      >>> from spanax.hardware.mesh import MeshShape
      >>> link = axis_link(cluster("a100-80gb:8"), MeshShape.of("data=8"), "data")
      >>> f"{collective_seconds('all_reduce', 2**30, link) * 1e3:.1f} ms; measured: 8.2 ms"
      '8.3 ms; measured: 8.2 ms'
    """
    n = link.size
    start = link.start_seconds
    if kind == "all_gather" or kind == "reduce_scatter":
        return all_gather_seconds(num_bytes, n, link.bytes_per_second, link.latency_seconds, start)
    if kind == "all_reduce":
        rate = link.all_reduce_bytes_per_second
        return all_reduce_seconds(num_bytes, n, rate, link.latency_seconds, start, link.tree_latency_seconds)
    if kind == "all_to_all":
        return all_to_all_seconds(num_bytes, n, link.all_to_all_bytes_per_second, link.tree_latency_seconds, start)
    return permute_seconds(num_bytes, n, link.permute_bytes_per_second, link.latency_seconds, start)


def _of_several(num_devices: Any, seconds: Any) -> Any:
    if isinstance(seconds, np.ndarray) or isinstance(num_devices, np.ndarray):
        return np.where(np.asarray(num_devices) > 1, seconds, 0.0)
    return seconds if num_devices > 1 else 0.0
