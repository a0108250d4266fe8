"""Every error Spanax raises, and the one place its text is built.

    SpanaxError            exit code 2: something asked for cannot be done
    ├── SizeError          2: a workload has no such size to change
    ├── NoLayoutError      2: no layout can be laid over a program on these devices
    ├── IdleAxisError      2: a mesh axis has nothing to shard in a program
    ├── ResizeError        2: a step cannot be traced with arrays of other sizes
    ├── DataError          65: what was read is not what it should be
    │   └── EntryError     65: something other than a regular file is in a run folder
    ├── CompilerError      70: a compiler died or took too long
    ├── HostsError         70: the processes of a run did not come together
    ├── NumbersError       70: the numbers of a run went wrong
    ├── WriteError         73: the place to write to cannot be written
    │   └── DiskFullError  73: there is no space left on its device
    └── ConfigError        78: a run is to go on as another run than it was

A run that was asked to stop, and can go on, ends with `PREEMPTED`. Where the user's own code raises, the command line
ends with `MISTAKE`.

A message has at most four lines: what is wrong, where with its values, and the nearest thing that works.
"""

import difflib
from collections.abc import Iterable

from spanax.printable import printable

PREEMPTED = 75
"""The exit code of a run that was stopped where it was asked to, all saved: EX_TEMPFAIL of sysexits.h."""

MISTAKE = 3
"""The exit code of a command in which the user's own code raised: the model, the loss, the loader."""

INTERNAL = 70
"""The exit code of an error of Spanax itself: EX_SOFTWARE of sysexits.h."""


class SpanaxError(ValueError):
    """A request that cannot be carried out, told in at most four lines.

    Args:
      what: one line that names the thing and its values.
      where: the values around it; a line of its own.
      fix: the nearest thing that works; a line of its own.

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
    """A workload does not have the size that a request changes; exit code 2.

    Example:
      >>> SizeError("'resnet50' has no sequence length to change.").exit_code
      2
    """


class NoLayoutError(SpanaxError):
    """No layout shards a program evenly over the devices; exit code 2.

    Example:
      >>> NoLayoutError("no layout divides a batch of 7 among 8 devices.", fix="a batch of 8").exit_code
      2
    """


class IdleAxisError(SpanaxError):
    """A mesh axis shards no weight and saves no work in a program; exit code 2.

    Example:
      >>> IdleAxisError("mesh axis 'expert' (2) has nothing to shard in this program.").exit_code
      2
    """


class ResizeError(SpanaxError):
    """A step cannot be traced with arrays of other sizes than those it was written for; exit code 2.

    Example:
      >>> ResizeError("the step depends on the number of layers.").exit_code
      2
    """


class DataError(SpanaxError):
    """Data, a file or a checkpoint is missing, damaged or not what it should be; exit code 65.

    Example:
      >>> print(DataError("'text.txt' is empty.", fix="a file with text"))
      'text.txt' is empty.
        fix: a file with text
    """

    exit_code = 65


class EntryError(DataError):
    """An entry of a run folder is a link, a FIFO, a device, a folder or too large; exit code 65.

    Example:
      >>> print(EntryError("'LOCK' is a symbolic link, and has to be a regular file.", fix="remove it"))
      'LOCK' is a symbolic link, and has to be a regular file.
        fix: remove it
    """


class CompilerError(SpanaxError):
    """A compiler that was asked died, or took longer than it was given; exit code 70.

    Example:
      >>> CompilerError("XLA's compiler for v5e took longer than 60 s.", fix="--timeout 600").exit_code
      70
    """

    exit_code = 70


class HostsError(SpanaxError):
    """The processes of a run did not come together; another attempt may do better; exit code 70.

    Example:
      >>> HostsError("127.0.0.1:9911 is taken.", fix="another port").exit_code
      70
    """

    exit_code = 70


class NumbersError(SpanaxError):
    """A loss, a gradient or a parameter of a run went wrong, and the run is to end; exit code 70.

    Example:
      >>> print(NumbersError("step 7 went wrong: loss is nan.", fix="--on-bad-step rollback"))
      step 7 went wrong: loss is nan.
        fix: --on-bad-step rollback
    """

    exit_code = 70


class WriteError(SpanaxError):
    """The place to write to is in use or cannot be written; exit code 73.

    Example:
      >>> WriteError("the run folder 'runs/a' is in use.").exit_code
      73
    """

    exit_code = 73


class DiskFullError(WriteError):
    """There is no space left on the device of a run folder; exit code 73.

    Example:
      >>> DiskFullError("step 7 was not saved: no space left on the device.").exit_code
      73
    """


class ConfigError(SpanaxError):
    """A run is to go on with settings that would make it another run; exit code 78.

    Example:
      >>> ConfigError("the run was begun with batch 8, and is to go on with 16.").exit_code
      78
    """

    exit_code = 78


def first_line(error: BaseException) -> str:
    """What an error says in its first line, at most 200 letters of it; of one that says nothing, what it is.

    Example:
      >>> first_line(ValueError("no\\nmore")), first_line(KeyboardInterrupt())
      ('no', 'KeyboardInterrupt')
    """
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say instead of an unknown name: the closest known one, or all of them.

    Example:
      >>> nearest("fdsp", ["data", "fsdp"])
      "did you mean 'fsdp'? known: data, fsdp"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
    return (f"did you mean '{close[0]}'? " if close else "") + f"known: {listed}"
