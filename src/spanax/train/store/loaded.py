"""Which arrays of a checkpoint match the arrays that they are restored to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanax.errors import CheckpointError
from spanax.train.store.stacked_layers import dtype_and_shape


@dataclass(frozen=True)
class Loaded:
    """The arrays that were loaded from a checkpoint, and those that were not, by path.

    Attributes:
      source: the checkpoint.
      loaded: the loaded arrays.
      missing: the arrays that the checkpoint does not have; they keep their initial values.
      mismatched: the arrays with another shape in the checkpoint, with both shapes; they keep their initial values.
      unexpected: the arrays of the checkpoint that were not requested.
      step: the step of the checkpoint.

    Example:
      >>> print(Loaded("runs/base", ("kernel",), ("lora_a",), (), ("head",)))
      runs/base: loaded 1 of 2 arrays; missing: lora_a; unexpected: head
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    step: int = 0

    @staticmethod
    def of(
        source: str, saved: Mapping[str, str], reads: Mapping[str, Any], paths: Iterable[str], step: int = 0
    ) -> "Loaded":
        """Compares saved dtypes and shapes with `reads`: the arrays of `paths` in the form in which they were saved."""
        requested = {path: dtype_and_shape(target) for path, target in reads.items()}
        missing = requested.keys() - saved.keys()
        differs = [path for path in sorted(requested) if path in saved and saved[path] != requested[path]]
        return Loaded(
            source,
            tuple(path for path in sorted(paths) if path not in missing and path not in differs),
            tuple(sorted(missing)),
            tuple(f"{path}: model {requested[path]}, checkpoint {saved[path]}" for path in differs),
            tuple(sorted(saved.keys() - requested.keys())),
            step,
        )

    @property
    def is_complete(self) -> bool:
        """Whether every array was loaded, and every array of the checkpoint was requested."""
        return not (self.missing or self.mismatched or self.unexpected)

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        groups = (("missing", self.missing), ("mismatched", self.mismatched), ("unexpected", self.unexpected))
        lists = [f"{name}: {listed(paths)}" for name, paths in groups if paths]
        return "; ".join([f"{self.source}: loaded {len(self.loaded)} of {total} arrays", *lists])


def difference(loaded: Loaded, fix: str) -> CheckpointError:
    """Returns the error for arrays that differ."""
    kinds = {
        "missing": loaded.missing,
        "unexpected": loaded.unexpected,
        "of another shape or dtype": loaded.mismatched,
    }
    counts = ", ".join(f"{len(paths)} {kind}" for kind, paths in kinds.items() if paths)
    where = "; ".join(f"{kind}: {listed(paths, most=3)}" for kind, paths in kinds.items() if paths)
    message = f"checkpoint step {loaded.step} is of another model or optimizer; arrays: {counts}."
    return CheckpointError(message, where=f"{loaded.source}: {where}", fix=fix)


def listed(paths: Sequence[str], most: int = 6) -> str:
    """Returns the first paths and the number of the others, as text.

    Example:
      >>> listed(["a", "b", "c"], most=2)
      'a, b and 1 more'
    """
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
