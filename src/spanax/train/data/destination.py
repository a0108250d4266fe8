"""The arrays of a batch and their shardings, from a plan or from an example batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spanax.batch_dims import dims_by_name
from spanax.errors import ArgumentError, BatchError, PlanMismatchError
from spanax.train.data.elements import BatchLeaf, ExampleLeaf, Leaves
from spanax.train.data.source import batch_size, local_rows

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Destination:
    """Where batches go.

    Attributes:
      leaves: the arrays of a batch.
      shardings: the sharding of each array by path; None for NumPy arrays of the global batch.
      rows_R: the rows of the global batch that this process reads.
    """

    leaves: Sequence[BatchLeaf]
    shardings: "Mapping[str, jax.sharding.NamedSharding] | None"
    rows_R: np.ndarray

    @staticmethod
    def of(plan: Any, mesh: "jax.sharding.Mesh | None") -> "Destination":
        """Returns where the batches of a plan, or batches like an example batch, go.

        Raises:
          SpanaxError: `mesh` is not None for an example batch, or only some of its arrays are sharded.

        Example:
          >>> Destination.of({"x": np.zeros((4, 2), "float32")}, None).leaves
          [ExampleLeaf(path='x', shape=(4, 2), dtype='float32', axes=())]
        """
        if not hasattr(plan, "batch"):
            return _of_example(plan, mesh)
        mesh = plan.mesh.build() if mesh is None else mesh
        shardings = {leaf.path: leaf.sharding(mesh) for leaf in plan.batch}
        return Destination(plan.batch, shardings, local_rows(plan.batch, shardings, mesh.local_devices))

    def place(self, leaves: Leaves) -> Mapping[str, Any]:
        """Returns the global arrays, by path, from the rows of this process."""
        if self.shardings is None:
            return leaves
        import jax

        # device_put would compare the full batch across processes. On a CPU both may alias the NumPy buffer.
        make = jax.make_array_from_callback
        return {
            leaf.path: make(
                leaf.shape, self.shardings[leaf.path], partial(self._part, leaf, dim, leaves[leaf.path]),
                dtype=np.dtype(leaf.dtype),
            )
            for leaf, dim in zip(self.leaves, dims_by_name(self.leaves), strict=True)
        }  # fmt: skip

    def _part(self, leaf: BatchLeaf, dim: int | None, array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the part of a global array, with examples along a dim, at an index."""
        if array.shape == leaf.shape or dim is None:
            return array[index]
        start, stop, _ = index[dim].indices(leaf.shape[dim])
        first = int(np.searchsorted(self.rows_R, start))
        return array[(*index[:dim], slice(first, first + stop - start), *index[dim + 1 :])]


def _of_example(batch: Any, mesh: Any) -> Destination:
    import jax

    pairs = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not pairs or any(not hasattr(leaf, "dtype") for _, leaf in pairs):
        raise ArgumentError(
            f"batches need a plan, or an example batch, not a {type(batch).__name__}.",
            fix="spanax.plan(...), or a dict of arrays or jax.ShapeDtypeStructs",
        )
    by_path = {jax.tree_util.keystr(path, simple=True, separator=".") or "batch": leaf for path, leaf in pairs}
    dtypes = {path: str(jax.dtypes.canonicalize_dtype(leaf.dtype)) for path, leaf in by_path.items()}  # as in a plan
    leaves = [ExampleLeaf(path, tuple(leaf.shape), dtypes[path]) for path, leaf in by_path.items()]
    if mesh is not None:
        raise PlanMismatchError(
            "an example batch has no plan, and so no layout on a mesh.",
            fix="jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P('data')))",
        )
    shardings = {path: getattr(leaf, "sharding", None) for path, leaf in by_path.items()}
    named = {path: sharding for path, sharding in shardings.items() if isinstance(sharding, jax.NamedSharding)}
    if not named:
        return Destination(leaves, None, np.arange(batch_size(leaves)))
    if missing := sorted(shardings.keys() - named.keys()):
        raise BatchError(f"'{missing[0]}' of the example batch has no sharding.", fix="a NamedSharding for each array")
    devices = next(iter(named.values())).mesh.local_devices
    return Destination(leaves, named, local_rows(leaves, named, devices))
