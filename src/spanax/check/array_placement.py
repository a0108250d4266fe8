"""The placement of every array on devices, according to a plan file or to the newest checkpoint of a run."""

import base64
import itertools
import math
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.names import PLACES, PLAN
from spanax.errors import EntryError, FileError, MissingFileError
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Plan
from spanax.plan.sharding.layer_partition import Parts
from spanax.plan.sharding.placement import Placement
from spanax.plan.sharding.resolve import Spec
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
      plan: the plan; for a checkpoint, with the specs of the saved arrays.
      origin: `plan`, or `checkpoint N`.
      elsewhere: the arrays whose saved spec differs from the plan: path, planned spec and saved spec.
    """

    plan: Plan
    origin: str
    elsewhere: tuple[tuple[str, Spec, Spec], ...] = ()


def array_placement(path: Path) -> ArrayPlacement:
    """Returns the placement in a plan file, or in the newest complete checkpoint of a run folder. Uses no devices.

    Raises:
      DataError: the path is neither.
    """
    if path.is_file():
        return ArrayPlacement(Plan.load(path), "plan")
    if not path.is_dir():
        raise MissingFileError(f"there is no plan or run '{path}'.", fix="a plan file, or a run folder")
    saved = view.newest(manifest.steps_of_run(path), _saved)
    if saved is not None:
        return saved
    if Folder.of(path).kind(PLAN) is not None:
        return ArrayPlacement(Plan.of_run(path), "plan")
    raise MissingFileError(
        f"'{path}' is not a run folder: it has neither plan nor checkpoint.", fix="a plan file, or a run folder"
    )


def _saved(step: int, folder: Folder) -> ArrayPlacement:
    """Returns the placement of the arrays of a checkpoint."""
    plan = Plan.of_run(folder)
    specs = _saved_specs(folder)
    leaves = []
    elsewhere = []
    for leaf in plan.leaves:
        # JAX omits trailing unsharded dims of a spec.
        saved = specs.get(leaf.path, leaf.spec)
        if leaf.is_key and not any(saved[len(leaf.shape) :]):  # a random key is saved as words, in a trailing dim
            saved = saved[: len(leaf.shape)]
        spec = (*saved, *((),) * (len(leaf.shape) - len(saved)))
        by_dim = [axis for axes in spec for axis in axes]
        if len(spec) != len(leaf.shape) or not set(plan.mesh.names) >= set(by_dim):
            raise FileError(
                f"'{leaf.path}' was saved with {len(spec)} dims, sharded over {by_dim}.",
                where=f"{folder.path / PLACES}",
            )
        if spec != leaf.spec:
            elsewhere.append((leaf.path, leaf.spec, spec))
        leaves.append(_moved(leaf, spec, plan.mesh))
    return ArrayPlacement(replace(plan, leaves=tuple(leaves)), f"checkpoint {step}", tuple(elsewhere))


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


def _moved(leaf: Placement, spec: Spec, mesh: MeshShape) -> Placement:
    """Returns a leaf with another spec."""
    if spec == leaf.spec:
        return leaf
    local = tuple(size // mesh.ways(by) for size, by in zip(leaf.shape, spec, strict=True))
    num_bytes = leaf.item_bytes * math.prod(local)
    return replace(leaf, spec=spec, local_shape=local, local_bytes=num_bytes)


def _saved_specs(folder: Folder) -> dict[str, Spec]:
    """Returns the saved specs of a checkpoint's arrays, by path.

    Raises:
      DataError: the file is invalid.
    """
    try:
        specs = {}
        for key, text in parse_json(folder.read(PLACES)).items():
            saved = parse_json(text)
            if saved.get("sharding_type") == "NamedSharding":
                name = urllib.parse.unquote(base64.b64decode(key).decode())
                specs[name] = tuple(_axes(by) for by in saved["partition_spec"])
        return specs
    except FileNotFoundError:
        return {}
    except EntryError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileError(f"'{folder.path / PLACES}' is invalid.", where=f"{type(error).__name__}: {error}") from None


def _axes(by: Any) -> tuple[str, ...]:
    if isinstance(by, str):
        return (by,)
    return () if by is None else tuple(by)
