"""The exceptions that Spanax raises, and the format of their messages.

    SpanaxError            exit code 2: a request is invalid
    ├── SizeError          2: a workload does not have the size to change
    ├── NoLayoutError      2: no layout shards a program over these devices
    ├── IdleAxisError      2: a mesh axis has nothing to shard in a program
    ├── IndivisibleError   2: a mesh axis does not divide an axis that it must shard
    ├── ResizeError        2: a step cannot be traced with arrays of other sizes
    ├── DataError          65: data, a file or a checkpoint is invalid
    │   └── EntryError     65: an entry of a run folder is not a regular file
    ├── CompilerError      70: a compiler crashed or timed out
    ├── HostsError         70: the processes of a run failed to connect
    ├── NumbersError       70: the training of a run diverged
    ├── WriteError         73: a destination cannot be written
    │   └── DiskFullError  73: the device is full
    └── ConfigError        78: a run is resumed with incompatible settings

A run that is preempted and can be resumed exits with `PREEMPTED`. If user code raises, the command line exits with
`MISTAKE`.

A message has at most four lines: the error, `where` with the values involved, and `fix` with a valid alternative.
"""

import difflib
from collections.abc import Iterable

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

    Example:
      >>> print(SpanaxError("unknown layout 'fdsp'.", where="--layout fdsp", fix="did you mean 'fsdp'?"))
      unknown layout 'fdsp'.
        where: --layout fdsp
        fix: did you mean 'fsdp'?
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = ""):
        lines = [what, f"  where: {where}" if where else "", f"  fix: {fix}" if fix else ""]
        super().__init__("\n".join(printable(line) for line in lines if line))


class SizeError(SpanaxError):
    """A workload does not have the size that a request changes; exit code 2."""


class NoLayoutError(SpanaxError):
    """No layout shards a program evenly over the devices; exit code 2."""


class IdleAxisError(SpanaxError):
    """A mesh axis shards no weight and saves no work in a program, or no array in storage; exit code 2.

    `axis` is the name of the mesh axis, and `in_storage` whether it was to shard arrays in storage.
    """

    def __init__(self, what: str, *, axis: str, in_storage: bool = False, where: str = "", fix: str = ""):
        super().__init__(what, where=where, fix=fix)
        self.axis, self.in_storage = axis, in_storage


class IndivisibleError(SpanaxError):
    """A mesh axis does not divide an axis of a program that it must shard; exit code 2.

    `axis` is the name of the mesh axis.
    """

    def __init__(self, what: str, *, axis: str, where: str = "", fix: str = ""):
        super().__init__(what, where=where, fix=fix)
        self.axis = axis


class ResizeError(SpanaxError):
    """A step cannot be traced with arrays of different sizes than those it was written for; exit code 2."""


class DataError(SpanaxError):
    """Data, a file or a checkpoint is missing, corrupt or invalid; exit code 65.

    Example:
      >>> print(DataError("'text.txt' is empty.", fix="a file with text"))
      'text.txt' is empty.
        fix: a file with text
    """

    exit_code = 65


class EntryError(DataError):
    """An entry of a run folder is a link, a FIFO, a device, a folder or too large; exit code 65."""


class CompilerError(SpanaxError):
    """A compiler crashed or timed out; exit code 70.

    Example:
      >>> CompilerError("XLA's compiler for v5e took longer than 60 s.", fix="--timeout 600").exit_code
      70
    """

    exit_code = 70


class HostsError(SpanaxError):
    """The processes of a run failed to connect, and may succeed in another attempt; exit code 70."""

    exit_code = 70


class NumbersError(SpanaxError):
    """A loss, gradient or parameter is invalid and ends the run; exit code 70.

    Example:
      >>> print(NumbersError("step 7 is bad: loss is nan.", fix="--on-bad-step rollback"))
      step 7 is bad: loss is nan.
        fix: --on-bad-step rollback
    """

    exit_code = 70


class WriteError(SpanaxError):
    """The destination is in use or cannot be written; exit code 73.

    Example:
      >>> WriteError("the run folder 'runs/a' is in use.").exit_code
      73
    """

    exit_code = 73


class DiskFullError(WriteError):
    """The device of a run folder is full; exit code 73."""


class ConfigError(SpanaxError):
    """A run is resumed with settings that are incompatible with its previous ones; exit code 78."""

    exit_code = 78


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, truncated to 200 characters, or its type if the message is empty.

    Example:
      >>> first_line(ValueError("no\\nmore")), first_line(KeyboardInterrupt())
      ('no', 'KeyboardInterrupt')
    """
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a `fix` for an unknown name: the closest known name, if any, and a list of known names.

    Example:
      >>> nearest("fdsp", ["data", "fsdp"])
      "did you mean 'fsdp'? known: data, fsdp"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
    return (f"did you mean '{close[0]}'? " if close else "") + f"known: {listed}"
