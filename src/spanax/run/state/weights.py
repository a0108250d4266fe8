"""Weights: a model's numbers without its optimizer, into a checkpoint and out of one, a few arrays at a time.

Such a checkpoint is step 0 of a folder, as any other but for what it does not hold. Blocks are saved one by one, as
those of a list, whatever the model keeps them in: a host never holds more than a few of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanax.entries.folder import Folder
from spanax.entries.names import META, PLAN
from spanax.errors import DataError, WriteError
from spanax.printable import to_stderr
from spanax.run.distributed.processes import from_first
from spanax.run.store import checkpoint, manifest, view
from spanax.run.store.stacked_layers import Regrouped, told

if TYPE_CHECKING:
    import jax
    import numpy as np

    from spanax.plan.plan import Placement
    from spanax.trace.program import Program

LEAST_BYTES = 1 << 22
"""Arrays are moved together up to the size of the largest, and up to so much where all are smaller."""

PARTIAL = "init=..., partial=True (--init-partial) loads the weights that match and lists the others"


@dataclass(frozen=True)
class Part:
    """An array that is to be saved, and is made when its turn comes."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Loaded:
    """Which weights of a model came from a checkpoint.

    Attributes:
      source: the checkpoint.
      loaded: the model's weights that were read.
      missing: those that the checkpoint does not hold; they are initialized by the model.
      mismatched: those of another shape there, each with both shapes; they are initialized by the model.
      unexpected: the checkpoint's weights that the model does not have.

    Example:
      >>> print(Loaded("runs/base", ("kernel",), ("lora_a",), (), ("head",)))
      runs/base: loaded 1 of 2 weights; missing: lora_a; unexpected: head
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        groups = (("missing", self.missing), ("mismatched", self.mismatched), ("unexpected", self.unexpected))
        lists = [f"{name}: {listed(paths)}" for name, paths in groups if paths]
        return "; ".join([f"{self.source}: loaded {len(self.loaded)} of {total} weights", *lists])


def listed(paths: Sequence[str], most: int = 6) -> str:
    """The first paths, and how many more there are.

    Example:
      >>> listed(["a", "b", "c"], most=2)
      'a, b and 1 more'
    """
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more


def write(directory: Path, parts: Mapping[str, Part], *, plan_json: str, meta: Mapping[str, Any]) -> None:
    """Save arrays as step 0 of a folder; the host holds no more than the largest of them twice.

    Args:
      directory: the folder of all steps; made if missing.
      parts: dotted path to array.
      plan_json: the text kept as plan.json.
      meta: JSON values kept in meta.json.

    Raises:
      DataError: what a part is made from is damaged; nothing is left.
      WriteError: the place cannot be written; nothing is left.
    """
    root = Folder.of(directory).resolved()
    leaves = {path: told(part) for path, part in parts.items()}
    texts = {PLAN: plan_json.encode(), META: manifest.meta_text(leaves, meta)}
    staging = checkpoint.prepare(root, 0, texts)
    try:
        orbax = checkpoint.orbax_v1()
        context = orbax.Context()
        context.asynchronous.create_directories_asynchronously = False
        # Every array is waited for, so that none needs to be copied; packed, it would be there twice too.
        context.memory.deepcopy_host_arrays = False
        context.array.saving.use_compression = False
        with context:
            for batch in batches({path: _num_bytes(part) for path, part in parts.items()}):
                made = {checkpoint.stored_name(path): parts[path].make() for path in batch}
                orbax.partial.save(staging.checked_path() / manifest.ARRAYS, made)
                del made
            orbax.partial.finalize(staging.path / manifest.ARRAYS)
        manifest.write(staging)
        manifest.settle(root)
        view.end(staging)
    except BaseException as error:
        checkpoint.abandon(staging)
        if isinstance(error, OSError | WriteError):
            raise checkpoint.failure(root, 0, error) from error
        raise


def batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names, in order, so many at a time that they take no more than the largest of all, or than `LEAST_BYTES`.

    Example:
      >>> list(batches({"a": 1 << 22, "b": 1 << 24, "c": 1 << 22, "d": 1 << 22}))
      [['a'], ['b'], ['c', 'd']]
    """
    most = max([*sizes.values(), LEAST_BYTES])
    taken: list[str] = []
    room = most
    for name, size in sizes.items():
        if taken and size > room:
            yield taken
            taken, room = [], most
        taken.append(name)
        room -= size
    if taken:
        yield taken


def load(
    program: Program,
    placements: Sequence[Placement],
    mesh: jax.sharding.Mesh,
    directory: str | os.PathLike[str],
    *,
    partial: bool = False,
    warn: Callable[[str], None] | None = None,
) -> tuple[dict[int, jax.Array], Loaded]:
    """A model's parameters and statistics out of a checkpoint, each on the devices that keep it, by number of leaf.

    Blocks may be a list there and a stack here, or the other way; floating dtypes become those of the program. Its
    optimizer, counts and random state are left.

    Args:
      program: the model.
      placements: of the program's leaves.
      mesh: the devices.
      directory: a folder of steps, or a run folder.
      partial: load the weights that match by path and shape, and leave the others out.
      warn: gets the loud line where the newest step is damaged; standard error by default.

    Raises:
      DataError: no step is good, or it is of another model.
    """
    import jax

    leaves = {leaf.path: (number, leaf) for number, leaf in enumerate(program.leaves) if is_weight(leaf)}
    targets = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placements[number].sharding(mesh))
        for path, (number, leaf) in leaves.items()
    }
    source = Source.of(directory, warn)
    found: dict[int, jax.Array] = {}
    groups = source.groups(targets)
    loaded = _matched(source, groups, str(directory))
    if not partial:
        fix = PARTIAL if loaded.loaded else "build the model that the checkpoint was saved from"
        checkpoint.compare(source.step, source.folder, source.saved, _all_reads(groups), fix=fix)
    elif not loaded.loaded:
        what = f"checkpoint step {source.step} holds none of the {len(targets)} weights of this model."
        raise DataError(what, where=str(loaded), fix="a checkpoint of a model that this one extends")
    for group in source.readable(groups):
        arrays = group.finish(source.read(group.reads))
        for path, array in arrays.items():
            number, leaf = leaves[path]
            found[number] = array if array.dtype == leaf.dtype else _cast(array, leaf.dtype)
    return found, loaded


def _matched(source: Source, groups: Sequence[Regrouped], directory: str) -> Loaded:
    """Which of the wanted weights a checkpoint holds."""
    reads = _all_reads(groups)
    saved, paths = source.saved, sorted(path for group in groups for path in group.targets)
    differs = [path for path in reads if path in saved and saved[path] != told(reads[path])]
    missing = reads.keys() - saved.keys()
    return Loaded(
        directory,
        tuple(path for path in paths if path not in missing and path not in differs),
        tuple(sorted(missing)),
        tuple(f"{path}: model {told(reads[path])}, checkpoint {saved[path]}" for path in sorted(differs)),
        tuple(sorted(saved.keys() - reads.keys())),
    )


def is_weight(leaf: Any) -> bool:
    """Whether a leaf is a parameter, or a statistic such as BatchNorm's; counts and random state are neither."""
    return leaf.kind == "param" or (leaf.kind == "other" and _is_floating(told(leaf)))


@dataclass(frozen=True)
class Source:
    """The newest good step of a folder: its number, its folder, and dtype and shape of its weights by path."""

    step: int
    folder: Folder
    saved: Mapping[str, str]

    @staticmethod
    def of(directory: str | os.PathLike[str], warn: Callable[[str], None] | None = None) -> Source:
        """What is there.

        Raises:
          DataError: no step is good.
        """
        root = manifest.steps_of_run(directory).resolved()
        say = warn or to_stderr
        folder = root.inner(from_first(lambda: checkpoint.choose(root, None, say).name, DataError))
        step = manifest.step_of(folder) or 0
        try:
            _, leaves, _ = manifest.read_meta(folder)
        except (OSError, ValueError) as error:
            raise view.unreadable(step, folder, error) from None
        saved = {path: text for path, text in leaves.items() if not path.startswith("optimizer.")}
        return Source(step, folder, {p: t for p, t in saved.items() if _is_floating(t)})

    def groups(self, targets: Mapping[str, Any]) -> list[Regrouped]:
        """The targets in the dtypes that they were saved in, those together whose paths differ in numbers alone."""
        import jax

        dtypes: dict[str, str] = {}
        for path, text in self.saved.items():
            dtype = text.partition("[")[0]
            if dtypes.setdefault(_unnumbered(path), dtype) != dtype:
                what = f"checkpoint step {self.step} holds '{path}' in {dtype} and others like it in another dtype."
                raise DataError(what, where=str(self.folder), fix="bring it in anew, with one --dtype")
        together: dict[str, dict[str, Any]] = {}
        for path, target in targets.items():
            key = _unnumbered(path)
            dtype = dtypes.get(key, str(target.dtype))
            wanted = jax.ShapeDtypeStruct(target.shape, dtype, sharding=target.sharding)
            together.setdefault(key, {})[path] = wanted
        saved: dict[str, dict[str, str]] = {}
        for path, text in self.saved.items():
            saved.setdefault(_unnumbered(path), {})[path] = text
        return [
            part
            for key, wanted in together.items()
            for part in _smallest(Regrouped.of(saved.get(key, {}), wanted), wanted)
        ]

    def readable(self, groups: Sequence[Regrouped]) -> list[Regrouped]:
        """The groups without the targets that are not there, or have another shape there."""
        return [
            replace(group, reads={path: t for path, t in group.reads.items() if self.saved.get(path) == told(t)})
            for group in groups
        ]

    def read(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays as they were saved, a few at a time: of JAX's, or of numpy's where the target is one.

        Raises:
          DataError: they cannot be read.
        """
        found: dict[str, Any] = {}
        try:
            for batch in batches({path: _num_bytes(target) for path, target in targets.items()}):
                arrays = {path: targets[path] for path in batch}
                found |= checkpoint.load(self.folder.inner(manifest.ARRAYS), arrays, is_all=False)
        except Exception as error:  # the files may be anybody's, and Orbax raises whatever comes of them
            raise view.unreadable(self.step, self.folder, error) from error
        return found


def _smallest(regrouped: Regrouped, wanted: Mapping[str, Any]) -> list[Regrouped]:
    """The same one array at a time, where none is made of others."""
    if regrouped.to_stack or regrouped.to_unstack:
        return [regrouped]
    return [Regrouped({path: target}, {path: target}, [], []) for path, target in wanted.items()]


def _all_reads(groups: Sequence[Regrouped]) -> dict[str, Any]:
    return {path: target for group in groups for path, target in group.reads.items()}


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
