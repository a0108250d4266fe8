"""The exceptions that Spanax raises, and the format of their messages.

Each type has a stable code, which its message ends the first line with: docs/errors.md has an entry for each.
Codes begin with 1 for arguments, 2 for machines and meshes, 3 for layouts and plans, 4 for the program, 5 for data and
files, 6 for runs; SPX0xx are those of lint rules. A type inherits the exit code of its base: 2, an invalid request, by
default; 65, 70, 73 and 78 as in sysexits.h.

A run that is preempted and can be resumed exits with `PREEMPTED`. If user code raises, the command line exits with
`MISTAKE`.

A message has at most four lines: the error, `where` with the values involved, and `fix` with a valid alternative.
"""

import difflib
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from spanax.printable import printable

PREEMPTED = 75
"""The exit code of a run that saved a checkpoint and stopped on request: EX_TEMPFAIL of sysexits.h."""

MISTAKE = 3
"""The exit code of a command in which user code raised: the model, the loss, or the data loader."""

INTERNAL = 70
"""The exit code of an internal error of Spanax: EX_SOFTWARE of sysexits.h."""


class SpanaxError(ValueError):
    """A request is invalid; exit code 2.

    Args:
      what: the error with its values, in one line.
      where: the context of the error, in a separate line.
      fix: the closest valid alternative, in a separate line.

    Attributes:
      code: identifies the type of the error in docs/errors.md.
      exit_code: the exit code of a command that it ends.

    Example:
      >>> print(SpanaxError("unknown layout 'fdsp'.", where="--layout fdsp", fix="did you mean 'fsdp'?"))
      unknown layout 'fdsp'. [SPX100]
        where: --layout fdsp
        fix: did you mean 'fsdp'?
    """

    code: ClassVar[str] = "SPX100"
    exit_code: ClassVar[int] = 2

    def __init_subclass__(cls, *, code: str):
        cls.code = code

    def __init__(self, what: str, *, where: str = "", fix: str = ""):
        lines = [what, f"  where: {where}" if where else "", f"  fix: {fix}" if fix else ""]
        super().__init__("\n".join(printable(line) for line in lines if line))

    def __str__(self) -> str:
        what, newline, more = super().__str__().partition("\n")
        return f"{what} [{self.code}]{newline}{more}"


class UnknownNameError(SpanaxError, code="SPX101"):
    """A name is unknown: of a layout, a workload, a chip, an axis, a setting, or another value."""


class RangeError(SpanaxError, code="SPX102"):
    """A number is out of its range."""


class FormatError(SpanaxError, code="SPX103"):
    """A text does not have the required form."""


class ConflictError(SpanaxError, code="SPX104"):
    """An argument contradicts another one, or does not apply together with it."""


class MissingError(SpanaxError, code="SPX105"):
    """A required argument is missing."""


class ArgumentError(SpanaxError, code="SPX106"):
    """An argument has an unsupported type."""

    @classmethod
    def of(cls, name: str, value: object, fix: str) -> "ArgumentError":
        """Returns the error for the value of an argument of this name.

        Example:
          >>> print(ArgumentError.of("mesh", 8, 'mesh="fsdp=8"'))
          `mesh` is 8, of type int. [SPX106]
            fix: mesh="fsdp=8"
        """
        text = repr(value)
        shown = "" if len(text) > 60 or text.startswith("<") or "\n" in text else f"{text}, "
        return cls(f"`{name}` is {shown}of type {type(value).__name__}.", fix=fix)


def check_type(name: str, value: object, types: type | tuple[type, ...], fix: str) -> None:
    """Checks the type of an argument; None is valid.

    Raises:
      SpanaxError: the type is none of these; a bool is an int only if it is listed.
    """
    is_bool = isinstance(value, bool) and types is not bool
    if value is not None and (is_bool or not isinstance(value, types)):
        raise ArgumentError.of(name, value, fix)


class NotInstalledError(SpanaxError, code="SPX107"):
    """An optional package or program is not installed."""


class UnsupportedError(SpanaxError, code="SPX108"):
    """The platform or the versions do not support a request."""


class ClusterError(SpanaxError, code="SPX201"):
    """No cluster of the chip has the requested number of devices or shape."""


class ClusterFileError(SpanaxError, code="SPX202"):
    """A cluster file has an invalid key or value."""


class HardwareError(SpanaxError, code="SPX203"):
    """A rate or the memory of a chip is unknown, or a dtype is not supported by it."""


class DeviceCountError(SpanaxError, code="SPX204"):
    """A mesh or a plan requires another number of devices."""


class MeshError(SpanaxError, code="SPX205"):
    """A mesh is invalid, or its axes do not suit the layout."""


class NoLayoutError(SpanaxError, code="SPX301"):
    """No layout shards the program evenly over the devices."""


class IdleAxisError(SpanaxError, code="SPX302"):
    """A mesh axis shards nothing in the program: no weight, no work, or no array in storage.

    `axis` is the name of the mesh axis, and `in_storage` whether it was to shard arrays in storage.
    """

    def __init__(self, what: str, *, axis: str, in_storage: bool = False, where: str = "", fix: str = ""):
        super().__init__(what, where=where, fix=fix)
        self.axis = axis
        self.in_storage = in_storage


class IndivisibleError(SpanaxError, code="SPX303"):
    """A mesh axis does not divide an axis of the program that it must shard.

    `axis` is the name of the mesh axis.
    """

    def __init__(self, what: str, *, axis: str, where: str = "", fix: str = ""):
        super().__init__(what, where=where, fix=fix)
        self.axis = axis


class CapacityError(SpanaxError, code="SPX304"):
    """No candidate fits in the memory of the devices, or reaches the target."""


class SizeError(SpanaxError, code="SPX305"):
    """A workload does not have the size that a request changes."""


class ResizeError(SpanaxError, code="SPX306"):
    """A step cannot be traced with arrays of other sizes than those it was written for."""


class PlanMismatchError(SpanaxError, code="SPX307"):
    """A plan was made for another program, mesh or dtype."""


class PipelineError(SpanaxError, code="SPX308"):
    """A step cannot be partitioned into pipeline stages as requested."""


class VariantError(SpanaxError, code="SPX309"):
    """A loss does not support the requested remat, microbatches, attention, chunks, padding or offload."""


class CalibrationError(SpanaxError, code="SPX310"):
    """Measured steps cannot calibrate the devices."""


class BuildError(SpanaxError, code="SPX401"):
    """`build` cannot be traced, or returns no module."""


class LossError(SpanaxError, code="SPX402"):
    """A loss or an evaluation returns an unsupported value."""


class StepError(SpanaxError, code="SPX403"):
    """A train step changes the structure of its state, or lacks a value that is required."""


class OptimizerError(SpanaxError, code="SPX404"):
    """An optimizer is not supported."""


class BatchError(SpanaxError, code="SPX405"):
    """A batch differs from the traced batch, or between processes."""


class ModelMeshError(SpanaxError, code="SPX406"):
    """The sharding in the model is invalid on its mesh or on the planned mesh."""


class StackError(SpanaxError, code="SPX407"):
    """Blocks cannot be stacked as the layers of one scan."""


class ObjectsError(SpanaxError, code="SPX408"):
    """NNX objects or arrays are not what `spanax.jit` or a checkpoint requires."""


class WorkloadError(SpanaxError, code="SPX409"):
    """A workload or checkpoint does not support the command."""


class LostStateError(SpanaxError, code="SPX410"):
    """Arrays were donated to a step that failed, and do not exist any more."""


class DecodeError(SpanaxError, code="SPX411"):
    """A model cannot be run token by token: it does not return logits, or no incremental form was found."""


class CausalityError(DecodeError, code="SPX412"):
    """The logits of a model depend on later tokens."""


class AdapterError(SpanaxError, code="SPX413"):
    """Adapters do not fit the model, or weights cannot be packed."""


class KernelError(SpanaxError, code="SPX414"):
    """A kernel of the user's own differs from its reference, or cannot run on shards."""


class DataError(SpanaxError, code="SPX501"):
    """Data, a file or a checkpoint is missing, corrupt or invalid; exit code 65.

    Example:
      >>> print(DataError("'text.txt' is empty.", fix="a file with text"))
      'text.txt' is empty. [SPX501]
        fix: a file with text
    """

    exit_code = 65


class TooFewExamplesError(DataError, code="SPX502"):
    """Data has fewer examples than required."""


class MissingFileError(DataError, code="SPX503"):
    """A file or folder does not exist."""


class FileError(DataError, code="SPX504"):
    """A file cannot be read, is damaged, or is of another kind."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> "FileError":
        """Returns the error for a file that cannot be opened; a missing one names the files of its kind beside it.

        Example:
          >>> print(FileError.of(Path("no/a.csv"), PermissionError(13, "Permission denied")))
          cannot read 'no/a.csv': Permission denied. [SPX504]
            fix: chmod u+r no/a.csv
        """
        fix = "copy it to a regular file"
        if isinstance(error, PermissionError):
            fix = f"chmod u+r {shlex.quote(str(path))}"
        elif isinstance(error, FileNotFoundError):
            folder = path.absolute().parent
            names = list[str]()
            with suppress(OSError):
                names = sorted(name for name in os.listdir(folder) if name.endswith(path.suffix))
            fix = nearest(path.name, names) if names else f"another path: '{folder}' has no {path.suffix or 'file'}"
        return cls(f"cannot read '{path}': {error.strerror}.", fix=fix)


class EntryError(DataError, code="SPX505"):
    """An entry of a run folder is a link, a FIFO, a device, a folder or too large."""


class CheckpointError(DataError, code="SPX506"):
    """A checkpoint is missing, damaged, or of another model."""


class WeightsError(DataError, code="SPX507"):
    """Imported weights do not match the model, or are not supported."""


class WriteError(SpanaxError, code="SPX511"):
    """A destination cannot be written; exit code 73.

    Example:
      >>> WriteError("cannot write 'plan.json'.").exit_code
      73
    """

    exit_code = 73


class InUseError(WriteError, code="SPX512"):
    """A destination is in use, or already contains results."""


class DiskFullError(WriteError, code="SPX513"):
    """The device of a run folder is full."""


class ConfigError(SpanaxError, code="SPX601"):
    """A run is resumed with settings or code that are incompatible with its previous ones; exit code 78."""

    exit_code = 78


class NumbersError(SpanaxError, code="SPX602"):
    """A loss, gradient or parameter is invalid and ends the run; exit code 70.

    Example:
      >>> print(NumbersError("step 7 is bad: loss is nan.", fix="--on-bad-step rollback"))
      step 7 is bad: loss is nan. [SPX602]
        fix: --on-bad-step rollback
    """

    exit_code = 70


class GroupError(SpanaxError, code="SPX603"):
    """The environment does not define the group of processes, or an address in it is invalid."""


class HostsError(SpanaxError, code="SPX604"):
    """The processes of a run failed to connect or do not take the same steps; exit code 70."""

    exit_code = 70


class LaunchError(SpanaxError, code="SPX605"):
    """A scheduler or cluster did not accept the processes."""


class CompilerError(SpanaxError, code="SPX606"):
    """A compiler crashed or timed out; exit code 70.

    Example:
      >>> CompilerError("XLA's compiler for v5e took longer than 60 s.", fix="--timeout 600").exit_code
      70
    """

    exit_code = 70


def error_types() -> Iterator[type[SpanaxError]]:
    """Yields every type of error, in the order of their codes.

    Example:
      >>> [kind.__name__ for kind in error_types()][:2]
      ['SpanaxError', 'UnknownNameError']
    """
    kinds = [SpanaxError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    yield from sorted(kinds, key=lambda kind: kind.code)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, truncated to 200 characters, or its type if the message is empty.

    The code of an error of Spanax is left out, because the line becomes part of another message.

    Example:
      >>> first_line(ValueError("no\\nmore")), first_line(KeyboardInterrupt())
      ('no', 'KeyboardInterrupt')
    """
    text = error.args[0] if isinstance(error, SpanaxError) else str(error)
    return (text.splitlines() or [type(error).__name__])[0][:200]


class FileErrors:
    """A context that raises errors of reading or writing a file as one of Spanax; those of Spanax pass unchanged.

    Example:
      >>> with FileErrors(WriteError, "cannot write 'plan.json'."):
      ...     raise PermissionError("permission denied")
      Traceback (most recent call last):
      spanax.errors.WriteError: cannot write 'plan.json'. [SPX511]
        where: permission denied
    """

    def __init__(self, kind: type[SpanaxError], what: str, *, fix: str = ""):
        self._kind = kind
        self._what = what
        self._fix = fix

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | ValueError) and not isinstance(error, SpanaxError):
            raise self._kind(self._what, where=first_line(error), fix=self._fix) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a `fix` for an unknown name: the closest known name, or one that contains it, and a list of known names.

    Example:
      >>> nearest("fdsp", ["data", "fsdp"])
      "did you mean 'fsdp'? known: data, fsdp"
      >>> nearest("embed", ["blocks.up.kernel", "embed.embedding"])
      "did you mean 'embed.embedding'? known: blocks.up.kernel, embed.embedding"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1) or [each for each in names if name and name in each]
    listed = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
    return (f"did you mean '{close[0]}'? " if close else "") + f"known: {listed}"
