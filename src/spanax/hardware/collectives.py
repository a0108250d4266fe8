"""Collectives: the seconds each takes, from its bytes and the link its devices are joined by.

`num_bytes` are those of the whole (gathered) array of one group for all_gather, reduce_scatter and all_reduce, and
what one device holds for all_to_all and permute. `bytes_per_second` go one way, out of one device. Numbers and numpy
arrays are taken alike; of one device alone nothing is asked.
"""

from typing import Any, Literal

import numpy as np

from spanax.hardware.links import AxisLink

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]


def all_gather_seconds(
    num_bytes: Any, num_devices: Any, bytes_per_second: Any, latency_seconds: Any = 0.0, start_seconds: Any = 0.0
) -> Any:
    """Seconds until every device has the whole array: start + (n - 1) (bytes / n / rate + latency).

    Every device passes n - 1 parts on around a ring. `latency_seconds` passes at each step.

    Source: the ring of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
    (2009), by halves; NCCL's and XLA's.

    Example:
      >>> round(all_gather_seconds(2048 * 8192 * 2, 4, 45e9) * 1e6)
      559
    """
    sent = (num_devices - 1) / num_devices * num_bytes / bytes_per_second
    return _of_several(num_devices, start_seconds + sent + (num_devices - 1) * latency_seconds)


def reduce_scatter_seconds(
    num_bytes: Any, num_devices: Any, bytes_per_second: Any, latency_seconds: Any = 0.0, start_seconds: Any = 0.0
) -> Any:
    """Seconds until every device has the sum of its part: as `all_gather_seconds`, with the parts going the other way.

    Source: as `all_gather_seconds`.

    Example:
      >>> reduce_scatter_seconds(8e9, 8, 100e9)
      0.07
    """
    return all_gather_seconds(num_bytes, num_devices, bytes_per_second, latency_seconds, start_seconds)


def all_reduce_seconds(
    num_bytes: Any,
    num_devices: Any,
    bytes_per_second: Any,
    latency_seconds: Any = 0.0,
    start_seconds: Any = 0.0,
    tree_seconds: Any = None,
) -> Any:
    """Seconds until every device has the sum: the cheaper of a ring and a tree.

    ring: start + 2 (n - 1) (bytes / n / rate + latency), a reduce_scatter and an all_gather.
    tree: start + 2 (bytes / rate + latency), up and down; `tree_seconds` is the tree's latency, by default ceil(log2 n)
    times `latency_seconds`.

    Source: the ring as `all_gather_seconds`; the tree, Sanders, Speck and Traeff, "Two-tree algorithms for full
    bandwidth broadcast, reduction and scan" (2009). NCCL too takes the cheaper.

    Example:
      >>> all_reduce_seconds(8e9, 8, 100e9), round(all_reduce_seconds(8, 8, 100e9, 1e-6) * 1e6, 3)
      (0.14, 6.0)
    """
    latency = np.ceil(np.log2(num_devices)) * latency_seconds if tree_seconds is None else tree_seconds
    ring = 2 * (num_devices - 1) * (num_bytes / num_devices / bytes_per_second + latency_seconds)
    tree = 2 * (num_bytes / bytes_per_second + latency)
    cheaper = np.minimum(ring, tree) if isinstance(ring - tree, np.ndarray) else float(min(ring, tree))
    return _of_several(num_devices, start_seconds + cheaper)


def all_to_all_seconds(
    num_bytes: Any, num_devices: Any, bytes_per_second: Any, latency_seconds: Any = 0.0, start_seconds: Any = 0.0
) -> Any:
    """Seconds until every device has sent each other one its part: start + (n - 1) / n bytes / rate + latency.

    `num_bytes` are one device's own; `latency_seconds` is the way to the farthest. On a torus the rate is what the
    lines leave to each device: `AxisLink.all_to_all_bytes_per_second`.

    Source: each device sends n - 1 of its n parts, all at once.

    Example:
      >>> all_to_all_seconds(8e9, 8, 100e9)
      0.07
    """
    sent = (num_devices - 1) / num_devices * num_bytes / bytes_per_second
    return _of_several(num_devices, start_seconds + sent + latency_seconds)


def permute_seconds(
    num_bytes: Any, num_devices: Any, bytes_per_second: Any, latency_seconds: Any = 0.0, start_seconds: Any = 0.0
) -> Any:
    """Seconds until every device has its neighbour's array: start + bytes / rate + latency.

    Source: each device sends what it holds once.

    Example:
      >>> permute_seconds(8e9, 8, 100e9)
      0.08
    """
    return _of_several(num_devices, start_seconds + num_bytes / bytes_per_second + latency_seconds)


def collective_seconds(kind: Collective, num_bytes: Any, link: AxisLink) -> Any:
    """Seconds of one collective over the mesh axes that a link stands for.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> from spanax.hardware.links import axis_link
      >>> from spanax.hardware.mesh import MeshShape
      >>> link = axis_link(cluster("a100-80gb:8"), MeshShape.of("data=8"), "data")
      >>> f"{collective_seconds('all_reduce', 2**30, link) * 1e3:.1f} ms; measured: 8.2 ms"
      '8.3 ms; measured: 8.2 ms'
    """
    n, start = link.size, link.start_seconds
    if kind == "all_gather" or kind == "reduce_scatter":
        return all_gather_seconds(num_bytes, n, link.bytes_per_second, link.latency_seconds, start)
    if kind == "all_reduce":
        rate = link.all_reduce_bytes_per_second
        return all_reduce_seconds(num_bytes, n, rate, link.latency_seconds, start, link.way_seconds)
    if kind == "all_to_all":
        return all_to_all_seconds(num_bytes, n, link.all_to_all_bytes_per_second, link.way_seconds, start)
    return permute_seconds(num_bytes, n, link.permute_bytes_per_second, link.latency_seconds, start)


def _of_several(num_devices: Any, seconds: Any) -> Any:
    if isinstance(seconds, np.ndarray) or isinstance(num_devices, np.ndarray):
        return np.where(np.asarray(num_devices) > 1, seconds, 0.0)
    return seconds if num_devices > 1 else 0.0
