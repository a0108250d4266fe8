"""Saves and restores training state on disk, and survives kills, full disks and bit flips.

DIR/<step>/ holds arrays/ (Orbax), plan.json, meta.json and manifest.json. The manifest is written last, and only its
presence marks a save as finished; every byte is verified against it before anything is restored. Orbax transfers and
writes the arrays; this module decides which steps are finished, valid, retained and restored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spanax.entries.folder import Folder
from spanax.entries.kind import Kind
from spanax.entries.names import META, PLAN
from spanax.errors import CheckpointError, DataError, ObjectsError, RangeError, SpanaxError, WriteError, first_line
from spanax.printable import to_stderr
from spanax.processes.processes import all_processes, from_first, is_first
from spanax.train.store import manifest, view, writer
from spanax.train.store.loaded import Loaded, difference
from spanax.train.store.manifest import ARRAYS, discard, read_meta
from spanax.train.store.pending import RUNNING, Pending, failure, finish_at_exit, join_running
from spanax.train.store.stacked_layers import Regrouped, dtype_and_shape
from spanax.train.store.view import SavedStep, describe, verify

if TYPE_CHECKING:
    import jax

__all__ = ["Pending", "Restored", "SavedStep", "describe", "restore", "save", "verify"]

SAME = "use the model and optimizer that the checkpoint was saved from"

# One save at a time into a folder, so that the host never holds two copies.
_STARTING = threading.Lock()
_ATTEMPTS = itertools.count()


@dataclass(frozen=True)
class Restored:
    """The result of `restore`: the step, its arrays by path, the caller's metadata, the saved leaves, and which of them
    match."""

    step: int
    arrays: dict[str, jax.Array]
    meta: Mapping[str, Any]
    leaves: Mapping[str, str]
    loaded: Loaded


def save(
    directory: str | os.PathLike[str],
    step: int,
    arrays: Mapping[str, jax.Array],
    *,
    plan_json: str | None,
    meta: Mapping[str, Any],
    keep: int | None = None,
) -> Pending:
    """Starts saving a step and returns once its arrays are copied, so that they may be donated.

    Waits first for a save that still runs in this directory, and raises its error. The first save locks the directory
    for this process, until `release` or its end.

    Args:
      directory: the folder of all steps; created if missing.
      step: the step number, 0 or more. An existing step of that number is replaced once the new one is finished.
      arrays: dotted path to array; the same paths on every process.
      plan_json: the content of plan.json, if there is a plan.
      meta: JSON values stored in meta.json.
      keep: the number of finished steps to keep: this one and the newest others; None keeps all.

    Raises:
      WriteError: the directory is not writable, or another process saves there.
    """
    step = _checked(step, arrays, keep)
    root = Folder.of(directory).resolved()
    orbax_v1()  # imports the executors that a save needs until it has finished
    finish_at_exit()
    stored = {stored_name(key): value for key, value in arrays.items() if not _is_empty(value)}
    with _STARTING:
        if root.path in RUNNING:
            RUNNING[root.path].wait()
        staging = prepare(root, step, arrays, plan_json, meta)
        try:
            response = _start(staging.checked_path() / ARRAYS, stored)
        except BaseException as error:
            abandon(staging)
            if isinstance(error, OSError):
                raise failure(root, step, error) from error
            raise
        pending = Pending(root, step, lambda: _finish(response, staging, root, step, keep))
        pending._thread.start()
        RUNNING[root.path] = pending
    return pending


def release(directory: str | os.PathLike[str]) -> None:
    """Lets other processes save into a directory, once the save that runs there has ended."""
    root = Folder.of(directory).resolved()
    with _STARTING:
        join_running(root)
        writer.release(root)


def restore(
    directory: str | os.PathLike[str],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    *,
    step: int | None = None,
    warn: Callable[[str], None] | None = None,
    select: Callable[[manifest.Meta], Mapping[str, str]] | None = None,
    fix: Callable[[Loaded], str] = lambda loaded: SAME,
    partial: bool = False,
) -> Restored:
    """Reads the newest valid step with the shardings of `targets`, whatever devices it was saved from.

    Args:
      directory: the folder of all steps.
      targets: dotted path to shape, dtype and sharding: the paths that were saved, or stacks of them.
      step: restore this step only.
      warn: called with one line if damaged steps were skipped; by default it is printed to stderr.
      select: returns the saved arrays to read, path to dtype and shape, given meta.json; all by default.
      fix: returns the advice for arrays that differ.
      partial: read only the arrays that match.

    Raises:
      DataError: no step is valid, `step` is not, or the saved arrays differ from `targets`.
      SpanaxError: a target has no sharding, or one that does not divide its shape.
    """
    root = Folder.of(directory).resolved()
    join_running(root)  # its outcome decides which step is the newest; its error is raised by `wait`
    unreadable: dict[str, DataError] = {}
    while True:
        try:
            number, folder = choose(root, step, warn, unreadable)
        except CheckpointError:
            if not unreadable:
                raise
            raise next(iter(unreadable.values())) from None
        try:
            restored = _read(number, folder, targets, select, fix, partial)
        except SpanaxError:
            raise
        except Exception as error:  # the files are untrusted, and Orbax raises any type of error for them
            unreadable[folder.name] = view.unreadable(number, folder, error)
        if all_processes(folder.name not in unreadable):
            return restored
        elsewhere = CheckpointError(f"checkpoint step {number} cannot be loaded by another process.", where=str(folder))
        unreadable.setdefault(folder.name, elsewhere)


def _read(
    step: int,
    folder: Folder,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    select: Callable[[manifest.Meta], Mapping[str, str]] | None,
    fix: Callable[[Loaded], str],
    partial: bool,
) -> Restored:
    record = read_meta(folder)
    saved = record.leaves if select is None else select(record)
    regrouped = Regrouped.of(saved, targets)
    loaded = Loaded.of(str(folder), saved, regrouped.reads, targets, step)
    if partial:
        regrouped = regrouped.matching(saved)
    elif not loaded.is_complete:
        raise difference(loaded, fix(loaded))
    _check_shardings(regrouped.reads)
    is_all = select is None and not partial
    arrays = regrouped.finish(load(folder.inner(ARRAYS), regrouped.reads, is_all=is_all))
    return Restored(step, arrays, record.meta, record.leaves, loaded)


# ---- saving


def _checked(step: int, arrays: Mapping[str, Any], keep: int | None) -> int:
    if isinstance(step, bool) or manifest.step_of(str(step)) is None:
        raise ObjectsError(f"step {step!r} cannot be saved.", fix="use a non-negative integer of at most 18 digits")
    if keep is not None and keep < 1:
        raise RangeError(f"keep={keep} would delete the step just saved.", fix="keep=1 keeps only the newest step")
    if not any(not _is_empty(value) for value in arrays.values()) or not all(arrays):
        raise ObjectsError("nothing to save." if all(arrays) else "an array without a name cannot be saved.")
    return int(step)


def prepare(
    root: Folder, step: int, arrays: Mapping[str, Any], plan_json: str | None, meta: Mapping[str, Any]
) -> Folder:
    """Removes leftovers and creates the staging folder on the first process; returns it on all processes."""
    leaves = {key: dtype_and_shape(value) for key, value in arrays.items()}
    texts = {META: manifest.meta_text(leaves, meta)} | ({} if plan_json is None else {PLAN: plan_json.encode()})
    # A unique name, so that late writes of a failed save never mix with those of the next.
    staging = root.inner(f"{step}.new{next(_ATTEMPTS)}")

    def make() -> str:
        try:
            root.make()
            writer.claim(root)
            manifest.clear(root)
            if root.kind(str(step)) is not None and step not in manifest.steps(root):
                raise FileExistsError(f"{root.path / str(step)} exists and is not a checkpoint")
            staging.make_new()
            for name, content in texts.items():
                staging.replace(name, [content], is_durable=False)
        except OSError as error:
            abandon(staging)
            raise failure(root, step, error) from error
        return staging.name

    return root.inner(from_first(make, WriteError))


def _start(folder: Path, stored: Mapping[str, jax.Array]) -> Any:
    """Copies the arrays to the host and has Orbax write them in the background."""
    orbax = orbax_v1()
    context = orbax.Context()
    # Otherwise four threads wait for minutes for a folder that cannot be created.
    context.asynchronous.create_directories_asynchronously = False
    # Replicas that share the writing of an array slice it first: one compilation for each shape, while steps wait.
    context.array.saving.use_replica_parallel = False
    with context:
        return orbax.save_async(folder, dict(stored))


def _finish(response: Any, staging: Folder, root: Folder, step: int, keep: int | None) -> None:
    """Finishes a save: arrays, then the manifest, then removal of the steps it replaces and of those beyond `keep`."""
    try:
        # Returns after a barrier: every process has written its shards.
        response.result()
        if not is_first():
            return
        manifest.write(staging)
    except BaseException as error:
        abandon(staging)
        raise failure(root, step, error) from error
    try:
        manifest.settle(root)
        # After a rollback, the new step may be older than steps of the abandoned run; it must not be removed.
        others = [number for number in manifest.steps(root) if number != step]
        for number in [] if keep is None else others[: max(0, len(others) - keep + 1)]:
            discard(root.inner(str(number)))
    except OSError as error:
        message = f"step {step} is saved, but an older one cannot be removed: {error.strerror}."
        raise WriteError(message, where=str(error.filename or root)) from error


def abandon(staging: Folder) -> None:
    """Removes an unfinished step, after the threads of Orbax have ended; they ignore failures of other threads."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            thread.join(timeout=10)
    if is_first():
        with contextlib.suppress(OSError):
            manifest.discard_written(staging)


# ---- restoring


def choose(
    root: Folder,
    step: int | None = None,
    warn: Callable[[str], None] | None = None,
    unreadable: Mapping[str, DataError] = MappingProxyType({}),
) -> tuple[int, Folder]:
    """Returns the newest valid step, or the requested one, and its folder: the same on every process.

    Args:
      root: the folder of all steps.
      step: the requested step.
      warn: called with one line if damaged steps were skipped; by default it is printed to stderr.
      unreadable: the folders that are intact and could not be loaded, and why.

    Raises:
      DataError: no step is valid, or `step` is not.
    """
    decide = functools.partial(_newest_valid, root, step, warn or to_stderr, unreadable)
    folder = root.inner(from_first(lambda: decide().name, CheckpointError))
    return manifest.step_of(folder) or 0, folder


def _newest_valid(
    root: Folder, step: int | None, warn: Callable[[str], None], unreadable: Mapping[str, DataError]
) -> Folder:
    candidates = [(number, path) for number, path in reversed(manifest.finished(root)) if step in (None, number)]
    if not candidates:
        raise _nothing(root, step)
    bad: list[str] = []
    for number, folder in candidates:
        if folder.name in unreadable:
            bad.append(first_line(unreadable[folder.name]))
            continue
        problems = view.problems(folder)
        if problems is None:  # removed or renamed by the run that saves here
            continue
        if not problems:
            if bad:
                warn(f"WARNING: skipped damaged checkpoint: {'; '.join(bad)}. Restoring step {number} of {root}")
            return folder
        bad.append(f"step {number}: {problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
    if not bad:
        return _newest_valid(root, step, warn, unreadable)
    message = "no valid checkpoint." if step is None else f"checkpoint step {step} is damaged."
    others = [] if step is None else [str(number) for number in manifest.steps(root) if number != step]
    fix = f"other steps here: {', '.join(others)}" if others else "restore a backup, or use another folder"
    raise CheckpointError(message, where=f"{root}: {'; '.join(bad)}", fix=fix)


def _nothing(root: Folder, step: int | None) -> CheckpointError:
    cut_short = [path.name for path in manifest.unfinished(root)]
    kind = root.kind()
    problem = " does not exist" if kind is None else " is not a folder"
    state = f"{root}{'' if kind is Kind.FOLDER else problem}" + (
        f" contains only unfinished steps: {', '.join(cut_short)}" if cut_short else ""
    )
    if step is None:
        return CheckpointError("no checkpoint found.", where=state, fix="pass the folder that has the numbered steps")
    there = ", ".join(map(str, manifest.steps(root))) or "none"
    return CheckpointError(f"no checkpoint of step {step}.", where=state, fix=f"finished steps: {there}")


def _check_shardings(targets: Mapping[str, Any]) -> None:
    """Raises if a target has no sharding, or one that does not divide its shape."""
    for key, target in targets.items():
        if target.sharding is None:
            raise ObjectsError(f"{key} has no sharding.", fix="every target needs a sharding")
        try:
            target.sharding.shard_shape(target.shape)
        except ValueError as error:
            # In Orbax, the reads of the other arrays would continue and print their tracebacks later.
            raise ObjectsError(f"the sharding of {key} does not fit its shape.", where=first_line(error)) from error


def load(folder: Folder, targets: Mapping[str, Any], *, is_all: bool = True) -> dict[str, jax.Array]:
    """Loads arrays from the folder `arrays` of a step; without `is_all`, the targets may be a subset."""
    import jax
    import numpy as np

    stored = {stored_name(key): target for key, target in targets.items() if not _is_empty(target)}
    context = orbax_v1().Context()
    context.pytree.loading.partial_load = not is_all
    with context:
        loaded = orbax_v1().load(folder.checked_path(), stored) if stored else {}

    def empty(target: Any) -> jax.Array:
        zeros = np.zeros(target.shape, target.dtype)
        return jax.make_array_from_callback(target.shape, target.sharding, lambda index: zeros[index])

    return {key: empty(target) if _is_empty(target) else loaded[stored_name(key)] for key, target in targets.items()}


def _is_empty(value: Any) -> bool:
    """Returns whether an array has no elements: Orbax rejects those, so only their metadata is saved."""
    return 0 in value.shape and not str(value.dtype).startswith("key<")


def stored_name(key: str) -> str:
    """Returns a dotted path as one file name, which cannot leave the folder on any file system and can be decoded."""
    quoted = urllib.parse.quote(key, safe="")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


@functools.cache
def orbax_v1() -> Any:
    """Returns Orbax's v1 API, imported on first use because the import takes seconds."""
    from orbax.checkpoint import v1

    # On a failed write each of its threads logs a page of tracebacks; WriteError reports it in one line.
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in str(record.msg))
    return v1
