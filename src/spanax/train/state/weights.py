"""Saves and loads the weights of a model without its optimizer, a few arrays at a time.

A checkpoint of weights is step 0 of a folder. Blocks are saved one by one, as those of a list, even if the model stacks
them, so that the host never stores more than a few of them.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanax.entries.folder import Folder
from spanax.errors import WeightsError, WriteError
from spanax.trace.optimizers.recipe import AVERAGED
from spanax.train.store import checkpoint, manifest, view
from spanax.train.store.loaded import Loaded, difference
from spanax.train.store.pending import failure
from spanax.train.store.stacked_layers import Regrouped, dtype_and_shape

if TYPE_CHECKING:
    import jax
    import numpy as np

    from spanax.adapters.packed import Packed
    from spanax.plan.sharding.placement import Placement
    from spanax.trace.program import Program

MIN_BATCH_BYTES = 1 << 22
"""The minimal size of a batch of arrays; larger batches are limited by the largest array."""

CODES = ".codes"
"""The end of the path of packed weights, which are integers."""

PARTIAL = "init=..., partial=True (--init-partial) loads the weights that match and lists the others"


@dataclass(frozen=True)
class Part:
    """An array to save, computed by `make` when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], np.ndarray]


def write(directory: Path, parts: Mapping[str, Part], *, plan_json: str, meta: Mapping[str, Any]) -> None:
    """Saves arrays as step 0 of a folder; the host never stores more than twice the largest of them.

    Args:
      directory: the folder of all checkpoints; created if missing.
      parts: arrays by dotted path.
      plan_json: the content of plan.json.
      meta: JSON values for meta.json.

    Raises:
      DataError: the source of an array is damaged; an incomplete checkpoint is removed.
      WriteError: the folder cannot be written; an incomplete checkpoint is removed.
    """
    root = Folder.of(directory).resolved()
    staging = checkpoint.prepare(root, 0, parts, plan_json, meta)
    try:
        orbax = checkpoint.orbax_v1()
        context = orbax.Context()
        context.asynchronous.create_directories_asynchronously = False
        # Each write is synchronous, so no copy is needed; compression would need another copy.
        context.memory.deepcopy_host_arrays = False
        context.array.saving.use_compression = False
        with context:
            for batch in batches({path: _num_bytes(part) for path, part in parts.items()}):
                arrays = {checkpoint.stored_name(path): parts[path].make() for path in batch}
                orbax.partial.save(staging.checked_path() / manifest.ARRAYS, arrays)
                del arrays
            orbax.partial.finalize(staging.path / manifest.ARRAYS)
        manifest.write(staging)
        manifest.settle(root)
    except BaseException as error:
        checkpoint.abandon(staging)
        if isinstance(error, OSError | WriteError):
            raise failure(root, 0, error) from error
        raise
    finally:
        checkpoint.release(root)


def batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Groups names, in order, into batches of at most the size of the largest array, or of `MIN_BATCH_BYTES`.

    Example:
      >>> list(batches({"a": 1 << 22, "b": 1 << 24, "c": 1 << 22, "d": 1 << 22}))
      [['a'], ['b'], ['c', 'd']]
    """
    most = max([*sizes.values(), MIN_BATCH_BYTES])
    batch: list[str] = []
    num_free_bytes = most
    for name, size in sizes.items():
        if batch and size > num_free_bytes:
            yield batch
            batch = []
            num_free_bytes = most
        batch.append(name)
        num_free_bytes -= size
    if batch:
        yield batch


def load(
    program: Program,
    placements: Sequence[Placement],
    mesh: jax.sharding.Mesh,
    directory: str | os.PathLike[str],
    *,
    partial: bool = False,
) -> tuple[dict[int, jax.Array], Loaded]:
    """Loads a model's parameters and statistics from a checkpoint, sharded, by index of leaf.

    Blocks may be a list in the checkpoint and a stack in the model, or the reverse. Floating-point arrays are cast to
    the dtypes of the program. Optimizer state, counts and random state are not loaded.

    Args:
      program: the program of the model.
      placements: the placements of the program's leaves.
      mesh: the devices.
      directory: a folder of checkpoints, or a run folder.
      partial: load only the weights that match by path and shape.

    Returns:
      The loaded arrays, and the paths of loaded, missing, mismatched and unexpected weights.

    Raises:
      DataError: there is no intact checkpoint, or it is of another model.
    """
    import jax

    from spanax.adapters.lora import adapter_paths, packed_paths
    from spanax.adapters.packed import PARTS

    leaves = {leaf.path: (index, leaf) for index, leaf in enumerate(program.leaves) if is_weight(leaf)}
    targets = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placements[index].sharding(mesh))
        for path, (index, leaf) in leaves.items()
    }
    source = Source.of(directory)
    weights: dict[int, jax.Array] = {}
    known = {_unnumbered(path) for path in source.saved}
    for path in adapter_paths(program.abstract_model):
        if _unnumbered(path) not in known:  # a checkpoint of the base model
            del targets[path]
    to_pack = {}
    for path, packed in packed_paths(program.abstract_model):
        if _unnumbered(path) in known:  # the checkpoint has it unpacked
            codes, _ = (targets.pop(f"{path}.{part}") for part in PARTS)
            targets[path] = jax.ShapeDtypeStruct(packed.shape, packed.dtype, sharding=codes.sharding)
            to_pack[path] = packed
    groups = source.groups(targets)
    reads = {path: target for group in groups for path, target in group.reads.items()}
    paths = [path for group in groups for path in group.targets]
    loaded = Loaded.of(str(directory), source.saved, reads, paths, source.step)
    if not partial and not loaded.is_complete:
        fix = PARTIAL if loaded.loaded else "build the model that the checkpoint was saved from"
        if any(path.endswith(CODES) and path.removesuffix(CODES) in targets for path in source.saved):
            fix = "--lora with --quantize, as its run had: it stores packed weights"
        raise difference(loaded, fix)
    if partial and not loaded.loaded:
        message = f"checkpoint step {source.step} has none of the {len(targets)} weights of this model."
        raise WeightsError(message, where=str(loaded), fix="a checkpoint of a model that this one extends")
    for group in (group.matching(source.saved) for group in groups):
        arrays = group.finish(source.read(group.reads))
        for path, array in arrays.items():
            if path in to_pack:
                weights |= _packed(path, array, to_pack[path], leaves, placements, mesh)
                continue
            index, leaf = leaves[path]
            weights[index] = array if array.dtype == leaf.dtype else _cast(array, leaf.dtype)
    return weights, loaded


def _packed(
    path: str,
    array: jax.Array,
    packed: Packed,
    leaves: Mapping[str, tuple[int, Any]],
    placements: Sequence[Placement],
    mesh: jax.sharding.Mesh,
) -> dict[int, jax.Array]:
    """Packs the array of a path as the model stores it, and returns its parts by index of leaf."""
    import jax

    from spanax.adapters.packed import PARTS, Packed

    indices = [leaves[f"{path}.{part}"][0] for part in PARTS]
    shardings = [placements[index].sharding(mesh) for index in indices]

    def pack(array: jax.Array) -> list[jax.Array]:
        parts = Packed.of(array, packed.format, packed.dim, packed.dtype)
        return [parts.codes, parts.scale]

    parts = jax.jit(pack, out_shardings=shardings)(array)
    array.delete()
    return dict(zip(indices, parts, strict=True))


def is_weight(leaf: Any) -> bool:
    """Returns whether a leaf is a parameter or a statistic such as BatchNorm's, and not a count or random state."""
    return leaf.kind == "param" or (leaf.kind == "other" and _is_floating(dtype_and_shape(leaf)))


@dataclass(frozen=True)
class Source:
    """The newest intact checkpoint of a folder.

    Attributes:
      step: its step.
      folder: its folder.
      saved: dtype and shape of its weights by path, such as `float32[4,8]`.
      averages: the path of the average of each parameter, if the optimizer has averaged them.
    """

    step: int
    folder: Folder
    saved: Mapping[str, str]
    averages: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(directory: str | os.PathLike[str]) -> Source:
        """Opens the newest intact checkpoint; prints a warning to standard error if a newer one is damaged.

        Raises:
          DataError: there is none.
        """
        root = manifest.steps_of_run(directory).resolved()
        step, folder = checkpoint.choose(root)
        try:
            leaves = manifest.read_meta(folder).leaves
        except (OSError, ValueError) as error:
            raise view.unreadable(step, folder, error) from None
        saved = {path: text for path, text in leaves.items() if not path.startswith("optimizer.")}
        averages = {path.partition(f".{AVERAGED}.")[2]: path for path in leaves}
        averages = {path: average for path, average in averages.items() if path in saved}
        return Source(step, folder, {p: t for p, t in saved.items() if _is_floating(t) or p.endswith(CODES)}, averages)

    @property
    def dtype(self) -> str:
        """The dtype of most of its weights."""
        counts = Counter(text.partition("[")[0] for text in self.saved.values())
        return counts.most_common(1)[0][0]

    def groups(self, targets: Mapping[str, Any]) -> list[Regrouped]:
        """Returns the targets in their saved dtypes, grouped by path up to indices.

        Raises:
          DataError: weights of one group were saved in different dtypes.
        """
        import jax

        dtypes: dict[str, str] = {}
        for path, text in self.saved.items():
            dtype = text.partition("[")[0]
            if dtypes.setdefault(_unnumbered(path), dtype) != dtype:
                message = f"checkpoint step {self.step} has '{path}' in {dtype} and similar weights in another dtype."
                raise WeightsError(message, where=str(self.folder), fix="import it again, with one --dtype")
        grouped: dict[str, dict[str, Any]] = {}
        for path, target in targets.items():
            key = _unnumbered(path)
            dtype = dtypes.get(key, str(target.dtype))
            grouped.setdefault(key, {})[path] = jax.ShapeDtypeStruct(target.shape, dtype, sharding=target.sharding)
        saved: dict[str, dict[str, str]] = {}
        for path, text in self.saved.items():
            saved.setdefault(_unnumbered(path), {})[path] = text
        return [
            part
            for key, structs in grouped.items()
            for part in _smallest(Regrouped.of(saved.get(key, {}), structs), structs)
        ]

    def part(self, path: str) -> Part:
        """Returns an array on the host, its average if there is one; it is read when it is made."""
        dtype, shape = dtype_shape(self.saved[path])
        return Part(shape, dtype, functools.partial(self._array, path, dtype, shape))

    def _array(self, path: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        import jax.numpy as jnp
        import numpy as np

        if path in self.averages:
            dtype = jnp.promote_types(dtype, "float32").name
        read = self.averages.get(path, path)
        # A NumPy view of a scalar as target takes no memory; a JAX array would temporarily be copied.
        values: np.ndarray = self.read({read: np.broadcast_to(np.zeros((), dtype), shape)})[read]
        return values

    def read(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Reads arrays in their saved dtypes, a few at a time; as NumPy arrays for NumPy targets.

        Raises:
          DataError: they cannot be read.
        """
        loaded: dict[str, Any] = {}
        try:
            for batch in batches({path: _num_bytes(target) for path, target in targets.items()}):
                arrays = {path: targets[path] for path in batch}
                loaded |= checkpoint.load(self.folder.inner(manifest.ARRAYS), arrays, is_all=False)
        except Exception as error:  # the files are untrusted, and Orbax may raise anything for them
            raise view.unreadable(self.step, self.folder, error) from error
        return loaded


def dtype_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and the shape of a text such as `float32[4,8]`.

    Example:
      >>> dtype_shape("float32[4,8]"), dtype_shape("float32[]")
      (('float32', (4, 8)), ('float32', ()))
    """
    dtype, _, sizes = text.rstrip("]").partition("[")
    return dtype, tuple(int(size) for size in sizes.split(",") if size)


def _smallest(regrouped: Regrouped, structs: Mapping[str, Any]) -> list[Regrouped]:
    """Returns groups of one array each, if no array is stacked from or sliced into others."""
    if regrouped.to_stack or regrouped.to_unstack:
        return [regrouped]
    return [Regrouped({path: target}, {path: target}, [], []) for path, target in structs.items()]


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    import jax

    return jax.jit(lambda x: x.astype(dtype), out_shardings=array.sharding, donate_argnums=0)(array)


def _num_bytes(value: Any) -> int:
    import numpy as np

    return math.prod(value.shape) * np.dtype(value.dtype).itemsize


def _is_floating(text: str) -> bool:
    return text.startswith(("float", "bfloat"))


def _unnumbered(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdigit())
