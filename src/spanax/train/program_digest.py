"""Compares the program of a run with the program that saved a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spanax.entries.folder import Folder
from spanax.errors import ConfigError
from spanax.trace.analysis.computation import Computation
from spanax.trace.program import Program
from spanax.train.store import manifest
from spanax.train.store.stacked_layers import dtype_and_shape

KEY = "computation"
"""The key of the program's computation in meta.json."""

MAX_LISTED = 4


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a program with the one that saved a checkpoint.

    Attributes:
      differences: a description of each difference.
      unknown: why the computations cannot be compared; empty if they can.
    """

    differences: tuple[str, ...] = ()
    unknown: str = ""


def compared(program: Program, leaves: Mapping[str, str], meta: Mapping[str, Any]) -> Comparison:
    """Compares a program with the one that saved a checkpoint with these leaves and meta values.

    Computations are not compared across JAX versions, which trace the same code to different programs; the shapes and
    dtypes of arrays are checked when they are restored.
    """
    try:
        before = Computation.from_json(meta[KEY])
    except (KeyError, ValueError):
        return Comparison(unknown="the checkpoint has no record of what its program computes")
    if versions := program.computation.other_versions(before):
        return Comparison(unknown="; ".join(versions))
    differences = program.computation.differences(before)
    now = {leaf.path: dtype_and_shape(leaf) for leaf in program.leaves}
    names = sorted(path for path in {*now, *leaves} if now.get(path) != leaves.get(path))
    arrays = [f"{path} {leaves.get(path, 'missing')}, now {now.get(path, 'missing')}" for path in names[:MAX_LISTED]]
    if len(names) > MAX_LISTED:
        arrays.append(f"{len(names) - MAX_LISTED} more arrays")
    return Comparison((*arrays, *differences))


def meta_of(program: Program, position: Any, history: Any) -> dict[str, Any]:
    """Returns the meta values of a checkpoint: its program, the position in the data, and recent metrics."""
    program_meta = {"fingerprint": program.fingerprint, KEY: program.computation.to_json()}
    return program_meta | {"position": position, "history": history} | program.init.meta


def check_same_model(
    steps: Folder,
    program: Program,
    *,
    as_before: Callable[[], Program] | None,
    accepts: bool,
    warn: Callable[[str], None],
) -> None:
    """Raises if the newest checkpoint of a run was saved by another program.

    Args:
      steps: the folder of all checkpoints.
      program: the program of the resumed run.
      as_before: returns the program with the learning rate and number of steps that the run was last started with,
        which a custom train step contains; None if these are unchanged.
      accepts: whether the model may differ.
      warn: called with a message if the programs cannot be compared.

    Raises:
      ConfigError: the programs differ.
    """
    newest = manifest.finished(steps)[-1:]
    for step, folder in newest:
        try:
            record = manifest.read_meta(folder)
        except (OSError, ValueError):
            return  # damaged: `restore` reports it, and reads an older checkpoint
        comparison = compared(program, record.leaves, record.meta)
        if comparison.unknown:
            warn(f"only arrays, not the model code, are compared with those of step {step}: {comparison.unknown}")
        if not comparison.differences or accepts:
            return
        if as_before is not None and not compared(as_before(), record.leaves, record.meta).differences:
            return
        raise ConfigError(
            f"the model differs from the one that saved step {step}: {'; '.join(comparison.differences)}.",
            where=f"'{steps.outer}'",
            fix="the original code, another --output-dir, or --accept-changed-model to continue with this model",
        )
