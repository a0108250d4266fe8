"""Same model: whether a checkpoint was saved by the program that is to go on from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spanax.entries.folder import Folder
from spanax.errors import ConfigError
from spanax.run.store import manifest
from spanax.run.store.stacked_layers import told
from spanax.trace.analysis.computation import Computation
from spanax.trace.program import Program

KEY = "computation"
"""Where the meta of a checkpoint has what its program computes."""

MOST_LISTED = 4


@dataclass(frozen=True)
class Comparison:
    """A program next to the one that saved a checkpoint.

    Attributes:
      differences: what differs; empty where nothing does.
      unknown: why what the two compute cannot be compared; empty where it was.
    """

    differences: tuple[str, ...] = ()
    unknown: str = ""


def compared(program: Program, leaves: Mapping[str, str], meta: Mapping[str, Any]) -> Comparison:
    """A program next to the one that saved a checkpoint with these leaves and this meta.

    Other versions of JAX write another program of the same code. What restores the arrays compares them in any case.
    """
    try:
        before = Computation.from_json(meta[KEY])
    except (KeyError, ValueError):
        return Comparison(unknown="the checkpoint has no record of what its program computes")
    if others := program.computation.other_versions(before):
        return Comparison(unknown="; ".join(others))
    differences = program.computation.differences(before)
    now = {leaf.path: told(leaf) for leaf in program.leaves}
    names = sorted(path for path in {*now, *leaves} if now.get(path) != leaves.get(path))
    arrays = [f"{path} {leaves.get(path, 'missing')}, now {now.get(path, 'missing')}" for path in names[:MOST_LISTED]]
    if len(names) > MOST_LISTED:
        arrays.append(f"{len(names) - MOST_LISTED} more arrays")
    return Comparison((*arrays, *differences))


def meta_of(program: Program, position: Any, history: Any) -> dict[str, Any]:
    """What a checkpoint keeps of the program that saves it, the position in the data, and the metrics of late."""
    described = {"fingerprint": program.fingerprint, KEY: program.computation.to_json()}
    return described | {"position": position, "history": history} | program.init.meta


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
      steps: the folder of all steps.
      program: what is to go on.
      as_before: the program with the learning rate and steps that the run was last started with, where these changed:
        a train step of the user's own contains them.
      accepts: whether another model may go on.
      warn: gets a line where the programs cannot be compared.

    Raises:
      ConfigError: it is another program.
    """
    newest = manifest.finished(steps)[-1:]
    for step, folder in newest:
        try:
            _, leaves, meta = manifest.read_meta(folder)
        except (OSError, ValueError):
            return  # damaged: what restores it says so, and takes another one
        comparison = compared(program, leaves, meta)
        if comparison.unknown:
            warn(f"the model code is not compared with that of step {step}, its arrays are: {comparison.unknown}")
        if not comparison.differences or accepts:
            return
        if as_before is not None and not compared(as_before(), leaves, meta).differences:
            return
        raise ConfigError(
            f"the model is not the one that saved step {step}: {'; '.join(comparison.differences)}.",
            where=f"'{steps.outer}'",
            fix="the code that the run was started with, another --out, or --accept-changed-model to go on with this",
        )
