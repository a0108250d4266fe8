"""The links that connect the devices of a group over any set of mesh axes, for many meshes at once."""

from collections.abc import Sequence

import numpy as np

from spanax.hardware.cluster import Cluster
from spanax.hardware.links import AxisLink, axis_link, within
from spanax.hardware.mesh import MeshShape

FIELDS = [name for name in AxisLink.__dataclass_fields__ if name != "over"]
"""The numbers of a link."""

STAGES = -1
"""The set of axes of the groups of pipeline stages."""


class Links:
    """The links of every set of mesh axes on many meshes; computed once per set.

    Args:
      cluster: the devices.
      axes: names of the mesh axes inside a stage, in order.
      meshes: a column for each mesh: the number of stages, then the size of each axis.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> links = Links(cluster("a100:2x8"), ("data", "model"), np.asarray([[1, 1], [2, 4], [8, 4]]))
      >>> links.over(0b10).size, (links.over(0b01).bytes_per_second / 1e9).round()
      (array([8., 4.]), array([23., 46.]))
    """

    def __init__(self, cluster: Cluster, axes: Sequence[str], meshes: np.ndarray):
        self._cluster = cluster
        self._names = ("pipe", *axes)
        self._meshes = meshes
        sharing = np.stack(within(list(meshes), cluster.devices_per_node))
        self._within = np.unique(sharing, axis=1, return_inverse=True)[1].reshape(-1)
        self._known: dict[int, AxisLink] = {}

    def over(self, axes: int) -> AxisLink:
        """Returns the links of groups over a set of axes, a mask or `STAGES`, as arrays."""
        if axes not in self._known:
            chosen = (
                [0] if axes == STAGES else [index for index in range(1, len(self._names)) if axes >> (index - 1) & 1]
            )
            sizes = self._meshes[chosen].prod(0)
            kinds = self._within * (sizes.max() + 1) + sizes
            _, first, where = np.unique(kinds, return_index=True, return_inverse=True)
            links = [self._link(self._meshes[:, index].tolist(), chosen) for index in first]
            rows = np.asarray([[getattr(link, name) for name in FIELDS] for link in links], float).T
            self._known[axes] = AxisLink(**dict(zip(FIELDS, rows[:, where], strict=True)))
        return self._known[axes]

    def _link(self, sizes: Sequence[int], chosen: Sequence[int]) -> AxisLink:
        mesh = MeshShape(tuple(zip(self._names, sizes, strict=True)))
        return axis_link(self._cluster, mesh, [self._names[index] for index in chosen])
