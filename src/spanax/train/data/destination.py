"""The arrays of a batch and their shardings, from a plan or from an example batch, and what fits them.

Shape suffix: R rows of the global batch that this process reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spanax.batch_dims import ExampleDims, dims_by_name, num_examples, num_if_fewer, with_rows
from spanax.errors import ArgumentError, BatchError, DataError, PlanMismatchError

if TYPE_CHECKING:
    import jax

    from spanax.plan.sharding.placement import Placement


Leaves = dict[str, np.ndarray]
"""The arrays of one batch, or of one example, by path."""


class Remainder(dict[str, np.ndarray]):
    """The leaves of the examples after the last full batch, all of them in every process."""


class ExampleLeaf(NamedTuple):
    """An array of an example batch."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Destination:
    """Where batches go.

    Attributes:
      leaves: the arrays of a batch.
      shardings: the sharding of each array by path; None for NumPy arrays of the global batch.
      rows_R: the rows of the global batch that this process reads.
    """

    leaves: "Sequence[Placement | ExampleLeaf]"
    shardings: "Mapping[str, jax.sharding.NamedSharding] | None"
    rows_R: np.ndarray

    @staticmethod
    def of(plan: Any, mesh: "jax.sharding.Mesh | None") -> "Destination":
        """Returns where the batches of a plan, or batches like an example batch, go."""
        if not hasattr(plan, "batch"):
            return _of_example(plan, mesh)
        mesh = plan.mesh.build() if mesh is None else mesh
        shardings = {leaf.path: leaf.sharding(mesh) for leaf in plan.batch}
        return Destination(plan.batch, shardings, local_rows(plan.batch, shardings, mesh.local_devices))

    @cached_property
    def dims(self) -> ExampleDims:
        """The dim of each array with the examples; None for an array without examples."""
        return dims_by_name(self.leaves)

    @cached_property
    def batch_size(self) -> int:
        """The number of examples in a global batch."""
        return num_examples([leaf.shape for leaf in self.leaves], self.dims)

    @property
    def planned(self) -> str:
        """The arrays as text."""
        return described({leaf.path: leaf for leaf in self.leaves})

    def holds(self, item: Any) -> bool:
        """Returns whether an element is a batch; an example has one dim less."""
        values = flat(item)
        return any(np.ndim(values[leaf.path]) == len(leaf.shape) for leaf in self.leaves if leaf.path in values)

    def check_examples(self, name: str) -> None:
        """Raises DataError if an array of the batch has no examples, so that no source of examples can fill it."""
        if None in self.dims:
            message = f"{name} has examples, and {self.planned} differ in their number."
            raise DataError(message, fix="a source of batches")

    def conform(self, item: Any, name: str, *, is_last: bool = False) -> Leaves | Remainder:
        """Returns copies of the leaves of an example or a batch in the dtypes of the plan; loaders may reuse buffers.

        If `is_last`, a single process may also pass a smaller batch. Raises DataError if the item does not match.
        """
        if item is None:  # a filtered MapDataset has None for an excluded example
            raise DataError(f"{name} has None for an example.", fix="dataset.to_iter_dataset(), which skips them")
        values = flat(item)
        paths = {leaf.path for leaf in self.leaves}
        for message, differing in (
            ("the data has no leaf", paths - values.keys()),
            ("the plan has no leaf", values.keys() - paths),
        ):
            if differing:
                actual = described({path: np.asarray(value) for path, value in values.items()})
                where = f"{name} has {actual}"
                raise DataError(f"{message} '{min(differing)}'.", where=where, fix=f"the plan expects {self.planned}")
        in_batches = self.holds(item)
        count = 0
        if in_batches and is_last and len(self.rows_R) == self.batch_size:
            shapes = [np.shape(values[leaf.path]) for leaf in self.leaves]
            count = num_if_fewer(shapes, [leaf.shape for leaf in self.leaves], self.dims)
        leaves = Remainder() if count else {}
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            shapes = [leaf.shape, with_rows(leaf.shape, dim, len(self.rows_R))]
            if count:
                shapes = [with_rows(leaf.shape, dim, count)]
            if not in_batches:
                shapes = [example_shape(leaf, dim)]
            leaves[leaf.path] = conform_array(leaf, shapes, values[leaf.path], name)
        return leaves

    def stacked(self, items: Sequence[Any], name: str) -> Leaves:
        """Returns arrays whose first dim has the examples; raises DataError as `conform` does."""
        examples = [self.conform(item, name) for item in items]
        arrays = {}
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            rows = np.array([example[leaf.path] for example in examples], leaf.dtype)
            arrays[leaf.path] = rows.reshape(-1, *example_shape(leaf, dim))
        return arrays

    def from_rows(self, arrays: Leaves) -> Leaves:
        """Returns the leaves of a batch from arrays whose first dim has the examples."""
        dims = zip(self.leaves, self.dims, strict=True)
        return {leaf.path: np.ascontiguousarray(np.moveaxis(arrays[leaf.path], 0, dim or 0)) for leaf, dim in dims}

    def place(self, leaves: Leaves) -> Mapping[str, Any]:
        """Returns the global arrays, by path, from the rows of this process; a remainder as it is."""
        if self.shardings is None or isinstance(leaves, Remainder):
            return leaves
        import jax

        # device_put would compare the full batch across processes. On a CPU both may alias the NumPy buffer.
        make = jax.make_array_from_callback
        return {
            leaf.path: make(
                leaf.shape,
                self.shardings[leaf.path],
                partial(self._part, leaf.shape, dim, leaves[leaf.path]),
                dtype=np.dtype(leaf.dtype),
            )
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        }

    def _part(self, shape: tuple[int, ...], dim: int | None, array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the part of a global array, with examples along a dim, at an index."""
        if array.shape == shape or dim is None:
            return array[index]
        start, stop, _ = index[dim].indices(shape[dim])
        first = int(np.searchsorted(self.rows_R, start))
        return array[(*index[:dim], slice(first, first + stop - start), *index[dim + 1 :])]


def conform_array(leaf: Any, shapes: Sequence[tuple[int, ...]], value: Any, name: str) -> np.ndarray:
    """Returns a copy of a value of the source `name` in the dtype of the plan; raises DataError if it does not fit."""
    array = np.asarray(value)
    dtype = np.dtype(leaf.dtype)
    # As in JAX, NumPy's default 64-bit types become 32-bit; nothing else is cast implicitly. A text file writes the
    # float 2.0 as 2, which is read as an integer.
    is_narrowed = array.dtype.kind == dtype.kind and (array.dtype.itemsize, dtype.itemsize) == (8, 4)
    is_narrowed |= array.dtype == np.int64 and dtype == np.float32
    result = array.astype(dtype) if is_narrowed or array.dtype == dtype else array
    fix = f"the plan expects {described({leaf.path: leaf})}"
    message = ""
    if array.dtype.kind == "U":
        message = f"'{leaf.path}' is text; expected {dtype}."
        fix = f"a sequence of examples that encodes it: {fix}"
    elif array.shape not in shapes:
        message = f"'{leaf.path}' has shape {array.shape}; expected {shapes[0]}."
    elif array.dtype != dtype and not is_narrowed:
        message = f"'{leaf.path}' has dtype {array.dtype}; expected {dtype}."
    elif is_narrowed and array.dtype.kind in "iu" and not np.array_equal(result, array):
        message = f"'{leaf.path}' has values that do not fit {dtype}."
    if message:
        raise DataError(message, where=f"{name} has {described({leaf.path: array})}", fix=fix)
    return result


def local_rows(leaves: Sequence[Any], shardings: Mapping[str, Any], devices: Sequence[Any]) -> np.ndarray:
    """Returns the sorted rows of the global batch on the given devices, of shape [R].

    Processes read the same rows if the batch has fewer shards than there are processes (a model sharded over several
    hosts).
    """
    rows: set[int] = set()
    for leaf, dim in zip(leaves, dims_by_name(leaves), strict=True):
        if dim is not None:
            indices = shardings[leaf.path].devices_indices_map(leaf.shape)
            for device in devices:
                rows.update(range(*indices[device][dim].indices(leaf.shape[dim])))
    return np.array(sorted(rows), np.int64)


def example_shape(leaf: Any, dim: int | None) -> tuple[int, ...]:
    """Returns the shape of one example of an array of a batch."""
    shape: tuple[int, ...] = leaf.shape
    return shape if dim is None else (*shape[:dim], *shape[dim + 1 :])


def _of_example(batch: Any, mesh: Any) -> Destination:
    import jax

    pairs = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not pairs or any(not hasattr(leaf, "dtype") for _, leaf in pairs):
        raise ArgumentError(
            f"batches need a plan, or an example batch, not a {type(batch).__name__}.",
            fix="spanax.plan(...), or a dict of arrays or jax.ShapeDtypeStructs",
        )
    if mesh is not None:
        raise PlanMismatchError(
            "`mesh` needs a plan; an example batch carries its own shardings.",
            fix="jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P('data')))",
        )
    leaves = []
    shardings = {}
    for keys, leaf in pairs:
        path = jax.tree_util.keystr(keys, simple=True, separator=".") or "batch"
        dtype = str(jax.dtypes.canonicalize_dtype(leaf.dtype))  # as in a plan
        leaves.append(ExampleLeaf(path, tuple(leaf.shape), dtype))
        if isinstance(getattr(leaf, "sharding", None), jax.NamedSharding):
            shardings[path] = leaf.sharding
    if not shardings:
        return Destination(leaves, None, np.arange(num_examples([leaf.shape for leaf in leaves], dims_by_name(leaves))))
    if missing := sorted({leaf.path for leaf in leaves} - shardings.keys()):
        raise BatchError(f"'{missing[0]}' of the example batch has no sharding.", fix="a NamedSharding for each array")
    devices = next(iter(shardings.values())).mesh.local_devices
    return Destination(leaves, shardings, local_rows(leaves, shardings, devices))


def described(leaves: Mapping[str, Any]) -> str:
    """Returns the paths, dtypes and shapes of arrays or placements as text."""
    sizes = {path: ",".join(map(str, leaf.shape)) for path, leaf in leaves.items()}
    return ", ".join(f"{path} {leaf.dtype}[{sizes[path]}]" for path, leaf in leaves.items()) or "nothing"


def flat(item: Any, path: str = "") -> dict[str, Any]:
    """Returns the leaves of a batch by path, as in a program; tuples are flattened, lists are leaves.

    Example:
      >>> flat({"image": {"pixels": 1}, "pair": (2, 3)})
      {'image.pixels': 1, 'pair.0': 2, 'pair.1': 3}
    """
    if not isinstance(item, Mapping | tuple):
        return {path or "batch": item}
    pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
    inner = (flat(value, f"{path}.{key}" if path else str(key)) for key, value in pairs)
    return {leaf: value for part in inner for leaf, value in part.items()}


def nested(like: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """Returns the leaves as a pytree with the structure of `like`; the inverse of `flat`.

    Example:
      >>> nested({"image": {"pixels": None}}, {"image.pixels": 1})
      {'image': {'pixels': 1}}
    """
    if isinstance(like, Mapping):
        return {key: nested(inner, leaves, f"{path}.{key}" if path else str(key)) for key, inner in like.items()}
    if isinstance(like, tuple):
        return tuple(nested(inner, leaves, f"{path}.{i}" if path else str(i)) for i, inner in enumerate(like))
    return leaves[path or "batch"]
