"""Checkpoints of the objects of a custom training loop, in the format of those of `spanax train`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, final, overload

from spanax.errors import CheckpointError, ObjectsError, RangeError, WriteError, first_line
from spanax.printable import to_stderr
from spanax.processes.processes import is_first, join_group
from spanax.train.state.host_arrays import as_saved, like, target_of
from spanax.train.state.named_objects import MODEL, NamedObjects, is_nnx
from spanax.train.store import checkpoint, manifest
from spanax.train.store.checkpoint import Pending
from spanax.train.store.loaded import Loaded

OPTIMIZER = "optimizer"
"""The object of a run's checkpoint next to `model`."""

OBJECTS = "objects"
STATES = "states"
"""Keys of meta.json: the names of the saved objects, and the states of those without arrays by name."""

RUN_STATES = {"data": "position", "guard": "history"}
"""Objects whose states have their own key in meta.json, which is that of a run."""

PART = "restore some of the objects, or restore(objects, partial=True), which restores what matches"
"""The advice for objects that differ from those that were saved."""

METHODS = (("state", "restore"), ("get_state", "set_state"))
"""The methods by which an object without arrays returns its state as JSON, and restores it."""


@final
class Checkpoints:
    """The checkpoints in a folder, of the objects of a custom training loop.

    The objects are a dict of NNX objects by name (a model, an optimizer, metrics, `nnx.Rngs`, an `nnx.State` such as an
    average of the parameters) and of objects with a state in JSON: `spanax.Batches`, a `Watch` of a `spanax.Guard`,
    Grain's iterators. Arrays are saved as shards by the devices that store them, and restored onto the shardings that
    the arrays of the objects have at that time, on any mesh.

    Each step is a folder with a manifest of checksums, which is written last: a save that is killed or fails leaves no
    checkpoint, and every file is verified before it is used. A checkpoint of `model` and `optimizer` is one of a run:
    `spanax.restore`, `spanax train --init`, `spanax export` and `spanax checkpoint` read it, and this class reads the
    checkpoints of `spanax train`.

    Args:
      folder: the folder of all checkpoints, created by the first save; or the folder of a run with checkpoints.
      keep: the number of newest checkpoints to keep; all by default.
      warn: called with each warning; prints to standard error by default.

    Attributes:
      folder: the folder of all checkpoints.

    Example:
      >>> import optax, tempfile
      >>> from flax import nnx
      >>> def objects(seed):
      ...     model = nnx.Linear(16, 32, rngs=nnx.Rngs(seed))
      ...     return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)}
      >>> saved, new = objects(0), objects(1)
      >>> with Checkpoints(tempfile.mkdtemp(), keep=3) as checkpoints:
      ...     pending = checkpoints.save(10, saved)
      >>> checkpoints.restore(new), checkpoints.steps()
      (10, [10])
      >>> bool((new["model"].kernel == saved["model"].kernel).all())
      True
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int | None = None, warn: Callable[[str], None] | None = None
    ):
        join_group()
        if keep is not None and keep < 1:
            raise RangeError(f"keep={keep} would delete the step just saved.", fix="keep=1 keeps only the newest step")
        self.folder = manifest.steps_of_run(folder).resolved()
        self._keep = keep
        self._warn = warn or to_stderr
        self._pending: Pending | None = None

    def save(self, step: int, objects: Mapping[str, Any]) -> Pending:
        """Starts to save the objects as checkpoint `step`.

        Returns as soon as the arrays are copied, so that the next step may run and donate them. `wait()` on the result
        waits until the checkpoint is on disk. Waits first for the previous save into this folder. Without `with` and
        `wait()`, the program finishes the save before it exits, and an error of it is only printed. From the first save
        until `close()`, or until this process ends, no other process can save into the folder.

        Raises:
          SpanaxError: an object has neither arrays nor a state in JSON.
          WriteError: another process saves into the folder, it cannot be written, or the previous save failed.
        """
        named, others = _parted(objects)
        states = {name: getattr(value, _methods(value)[0])() for name, value in others.items()}
        meta: dict[str, Any] = {OBJECTS: list(named.names)}
        meta |= {key: states.pop(name) for name, key in RUN_STATES.items() if name in states}
        meta |= {STATES: states} if states else {}
        arrays = as_saved(named.arrays)
        self._pending = checkpoint.save(self.folder, step, arrays, plan_json=None, meta=meta, keep=self._keep)
        return self._pending

    @overload
    def restore(
        self, objects: Mapping[str, Any], *, step: int | None = None, partial: Literal[False] = False
    ) -> int: ...

    @overload
    def restore(self, objects: Mapping[str, Any], *, step: int | None = None, partial: Literal[True]) -> Loaded: ...

    def restore(self, objects: Mapping[str, Any], *, step: int | None = None, partial: bool = False) -> int | Loaded:
        """Restores the objects in place, and returns the step of the checkpoint.

        Each array is read onto the sharding of the array that it replaces, and only the shards of this process are
        read. Every file is verified first; if the newest checkpoint is damaged or cannot be loaded, the next older
        intact one is restored with a warning. Objects of the checkpoint that are not passed are not read.

        The devices store the previous and the restored arrays until it returns, except for an abstract model of
        `nnx.eval_shape`, which has none: its arrays take the shardings of its `jax.ShapeDtypeStruct`s.

        Args:
          objects: the objects, or some of those that were saved.
          step: the step to restore; the newest intact one by default.
          partial: restore only the arrays and objects that match by path, shape and dtype, for a model with additional
            weights (LoRA adapters, a new head). Returns `step` and the paths `loaded`, `missing`, `mismatched` and
            `unexpected`, which a warning also lists.

        Raises:
          DataError: there is no intact checkpoint, or an object is missing in it or has other arrays. The arrays of the
            objects are then unchanged.
          SpanaxError: an object has neither arrays nor a state in JSON.
        """
        named, others = _parted(objects)
        targets = {path: target_of(value) for path, value in named.arrays.items()}

        def select(record: manifest.Meta) -> Mapping[str, str]:
            saved = _names(record)
            if not partial:
                _check_names([*named.names, *others], [*saved, *_states(record.meta)], self.folder)
            return {path: text for path, text in record.leaves.items() if _owner(path, saved) in named.names}

        saved = checkpoint.restore(
            self.folder, targets, step=step, warn=self._warn, select=select, fix=lambda loaded: PART, partial=partial
        )
        arrays = {path: like(named.arrays[path], array) for path, array in saved.arrays.items()}
        states = _states(saved.meta)
        loaded = _with_states(saved.loaded, others, states)
        if partial and objects and not loaded.loaded:
            message = f"checkpoint step {saved.step} has none of the arrays of these objects."
            raise CheckpointError(message, where=str(loaded), fix="objects like those that were saved")
        _restore_states({name: value for name, value in others.items() if name in states}, states)
        named.update(named.arrays | arrays)
        if not partial:
            return saved.step
        if not loaded.is_complete and is_first():
            self._warn(f"WARNING: {loaded}")
        return loaded

    def latest(self) -> int | None:
        """Returns the newest finished step, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Returns the finished steps, the newest last; a save that is still running is not among them."""
        return manifest.steps(self.folder)

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          WriteError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def close(self) -> None:
        """Waits until the last save is on disk, and lets other processes save into the folder.

        Raises:
          WriteError: the save failed.
        """
        try:
            self.wait()
        finally:
            checkpoint.release(self.folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self.close()
        except WriteError as failed:
            if kind is None:
                raise
            self._warn(f"WARNING: {first_line(failed)}")  # the error of the loop is the one to raise

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, steps {', '.join(map(str, self.steps())) or 'none'})"


def _parted(objects: Mapping[str, Any]) -> tuple[NamedObjects, dict[str, Any]]:
    """Returns the arrays of the NNX objects, and the other objects by name.

    Raises:
      SpanaxError: a name is not an identifier, or an object has neither arrays nor a state.
    """
    if not isinstance(objects, Mapping):
        raise ObjectsError(
            f"the objects are a {type(objects).__name__}.", fix='a dict: {"model": model, "optimizer": optimizer}'
        )
    for name in objects:
        if not isinstance(name, str) or not name.isidentifier():
            raise ObjectsError(f"{name!r} cannot be the name of an object.", fix="letters, digits and _")
    others = {name: value for name, value in objects.items() if not is_nnx(value)}
    for value in others.items():
        _methods(*value[::-1])
    return NamedObjects.of({name: value for name, value in objects.items() if name not in others}), others


def _methods(value: Any, name: str = "") -> tuple[str, str]:
    """Returns the names of the methods that return and restore the state of an object.

    Raises:
      SpanaxError: it has none.
    """
    for methods in METHODS:
        if all(callable(getattr(value, method, None)) for method in methods):
            return methods
    raise ObjectsError(
        f"'{name}' is a {type(value).__name__}, which has neither arrays nor a state.",
        fix="an NNX object, nnx.State(arrays), or an object with state() and restore(), or get_state() and set_state()",
    )


def _restore_states(others: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restores the states of objects; if one cannot be restored, those before it go back to where they were."""
    restored: list[tuple[Callable[[Any], Any], Any]] = []
    try:
        for name, value in others.items():
            read, write = (getattr(value, method) for method in _methods(value))
            restored.append((write, read()))
            write(states[name])
    except BaseException:
        for write, before in restored[:-1]:
            write(before)
        raise


def _states(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states in the meta values of a checkpoint by name."""
    saved = meta.get(STATES)
    states = dict(saved) if isinstance(saved, Mapping) else {}
    return states | {name: meta[key] for name, key in RUN_STATES.items() if meta.get(key) is not None}


def _names(record: manifest.Meta) -> list[str]:
    """Returns the names of the objects with arrays in a checkpoint; one of a run has a model and an optimizer."""
    saved = record.meta.get(OBJECTS)
    if isinstance(saved, list):
        return [str(name) for name in saved]
    return [MODEL, *([OPTIMIZER] if any(path.startswith(f"{OPTIMIZER}.") for path in record.leaves) else [])]


def _owner(path: str, names: list[str]) -> str:
    """Returns the name of the object that an array of a checkpoint belongs to; only those of `model` have no prefix."""
    first = path.partition(".")[0]
    return first if first in names else MODEL


def _check_names(names: list[str], saved: list[str], folder: os.PathLike[str]) -> None:
    """Checks that objects of these names are among the saved ones.

    Raises:
      DataError: one is missing.
    """
    for name in names:
        if name not in saved:
            message = f"the checkpoint has no object '{name}'."
            raise CheckpointError(message, where=f"{folder}: {', '.join(saved)}", fix=PART)


def _with_states(loaded: Loaded, others: Mapping[str, Any], states: Mapping[str, Any]) -> Loaded:
    """Returns the lists of arrays and of the objects without arrays."""
    restored = tuple(name for name in others if name in states)
    missing = tuple(name for name in others if name not in states)
    return replace(loaded, loaded=(*loaded.loaded, *restored), missing=(*loaded.missing, *missing))
