"""The placement of every array on devices, according to a plan file or to the newest checkpoint of a run."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spanax.entries.folder import Folder
from spanax.entries.names import PLAN
from spanax.errors import MissingFileError
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Plan
from spanax.plan.sharding.layer_partition import Parts
from spanax.plan.sharding.placement import Placement
from spanax.train.store import manifest, view


@dataclass(frozen=True)
class Shard:
    """A shard of an array: its slice of each dim, from `start` to `stop`, and the devices that store it.

    Devices are indexed in row-major order of the mesh.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class ArrayPlacement:
    """The placement of all arrays of a plan or run.

    Attributes:
      plan: the plan; of a checkpoint, the one that its arrays were saved under.
      origin: `plan`, or `checkpoint N`.
    """

    plan: Plan
    origin: str


def array_placement(path: Path) -> ArrayPlacement:
    """Returns the placement in a plan file, or in the newest complete checkpoint of a run folder. Uses no devices.

    Raises:
      DataError: the path is neither.
    """
    if path.is_file():
        return ArrayPlacement(Plan.load(path), "plan")
    if not path.is_dir():
        raise MissingFileError(f"there is no plan or run '{path}'.", fix="a plan file, or a run folder")
    saved = view.newest(
        manifest.steps_of_run(path), lambda step, folder: ArrayPlacement(Plan.of_run(folder), f"checkpoint {step}")
    )
    if saved is not None:
        return saved
    if Folder.of(path).kind(PLAN) is not None:
        return ArrayPlacement(Plan.of_run(path), "plan")
    raise MissingFileError(
        f"'{path}' is not a run folder: it has neither plan nor checkpoint.", fix="a plan file, or a run folder"
    )


def shards(leaf: Placement, mesh: MeshShape) -> list[Shard]:
    """Returns the shards of an array in index order, each with all devices that store a replica, without padding.

    Example:
      >>> leaf = Placement("w", (4, 6), "float32", "param", (None, None), ((), ("model",)), (4, 3), 48, "")
      >>> for shard in shards(leaf, MeshShape.of("data=2,model=2")):
      ...     print(shard.start, shard.stop, shard.devices)
      (0, 0) (4, 3) (0, 2)
      (0, 3) (4, 6) (1, 3)
    """
    sharding = [mesh.names.index(axis) for by in leaf.spec for axis in by]
    replicating = [axis for axis in range(len(mesh.axes)) if axis not in sharding]
    devices = np.arange(mesh.size).reshape([size for _, size in mesh.axes]).transpose(sharding + replicating)
    dims = [Parts(size, mesh.ways(by)) for size, by in zip(leaf.shape, leaf.spec, strict=True)]
    slices = [
        [(dim.first_layer(part), dim.first_layer(part + 1)) for part in range(mesh.ways(by))]
        for dim, by in zip(dims, leaf.spec, strict=True)
    ]
    rows = devices.reshape(-1, copies(leaf, mesh)).tolist()
    return [
        Shard(tuple(start for start, _ in index), tuple(stop for _, stop in index), tuple(row))
        for index, row in zip(itertools.product(*slices), rows, strict=True)
    ]


def copies(leaf: Placement, mesh: MeshShape) -> int:
    """Returns the number of replicas of each shard of an array."""
    return mesh.size // mesh.ways([axis for by in leaf.spec for axis in by])
