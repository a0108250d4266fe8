"""Parses the command after `--`: a `train ...` of Spanax, or a program of the user."""

import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from spanax.errors import ConflictError, MissingError, NotInstalledError, RangeError
from spanax.train.config import TrainConfig, check, check_path, with_settings
from spanax.train.record.folder import read_config
from spanax.train.record.heartbeat import FOLDER_VARIABLE
from spanax.usage.renamed_flags import current_arguments

TRAIN = "train"
"""The first word of a command of Spanax; any other first word is a program."""


@dataclass(frozen=True)
class TrainRequest:
    """A `train ...` command with a run folder.

    Attributes:
      args: the arguments of `train`, including `--output-dir`.
      folder: the run folder.

    Example:
      >>> request = TrainRequest.of(["train", "gpt-nano", "--output-dir", "runs/a"])
      >>> request.folder, request.argv(is_again=True)
      (PosixPath('runs/a'), ['train', 'gpt-nano', '--output-dir', 'runs/a', '--resume'])
    """

    args: tuple[str, ...]
    folder: Path
    is_program = False

    @staticmethod
    def of(argv: Sequence[str]) -> "TrainRequest":
        """Returns the request, with a new run folder if it names none.

        Raises:
          SpanaxError: it is not a valid `train` command; this is checked before it waits in a queue.
        """
        args = current_arguments(TRAIN, argv[1:])
        config = check(tyro.cli(TrainConfig, prog="spanax train", args=args))
        out = config.output_dir
        if out is None and config.config is not None:
            out = with_settings(TrainConfig(), read_config(Path(config.config)), config.config).output_dir
            check_path("--output-dir", out)
        if out is None:
            out = str(new_folder("runs"))
            args += ["--output-dir", out]
        return TrainRequest(tuple(args), Path(out))

    @property
    def name(self) -> str:
        """The folder's name for schedulers: lowercase letters, digits and dashes.

        Example:
          >>> TrainRequest.of(["train", "--output-dir", "runs/First_try"]).name
          'first-try'
        """
        return scheduler_name(self.folder)

    def argv(self, *, is_again: bool) -> list[str]:
        """Returns the arguments for a process of the run; a restart resumes from the newest checkpoint."""
        resume = ["--resume"] if is_again and "--resume" not in self.args else []
        return [TRAIN, *self.args, *resume]

    def command(self, python: str, *, is_again: bool) -> list[str]:
        """Returns the command line of a process of the run."""
        return [python, "-P", "-m", "spanax", *self.argv(is_again=is_again)]

    @property
    def flags(self) -> list[str]:
        """The flags of `launch` that belong to the request."""
        return []

    @property
    def environment(self) -> dict[str, str]:
        """The environment that its processes need besides that of their group."""
        return {}


@dataclass(frozen=True)
class ProgramRequest:
    """A program of the user, with a folder for its logs, heartbeats and events.

    Every attempt has the same command line: what a restart continues from is up to the program's own checkpoints.

    Attributes:
      words: the program and its arguments.
      folder: the folder.

    Example:
      >>> request = ProgramRequest(("python", "train.py", "--lr", "0.1"), Path("runs/a"))
      >>> request.command("", is_again=True), request.flags
      (['python', 'train.py', '--lr', '0.1'], ['--logs', 'runs/a'])
    """

    words: tuple[str, ...]
    folder: Path
    is_program = True

    @property
    def name(self) -> str:
        """The folder's name for schedulers: lowercase letters, digits and dashes."""
        return scheduler_name(self.folder)

    def argv(self, *, is_again: bool) -> list[str]:
        """Returns the program and its arguments, the same for every attempt."""
        return list(self.words)

    def command(self, python: str, *, is_again: bool) -> list[str]:
        """Returns the command line of a process: the program itself decides which interpreter it uses."""
        return list(self.words)

    @property
    def flags(self) -> list[str]:
        """The flags of `launch` that belong to the request."""
        return ["--logs", str(self.folder)]

    @property
    def environment(self) -> dict[str, str]:
        """The environment that its processes need besides that of their group."""
        # A killed process would lose the last lines of its log in Python's buffer.
        return {FOLDER_VARIABLE: str(self.folder.absolute()), "PYTHONUNBUFFERED": "1"}


Request = TrainRequest | ProgramRequest


def request_of(argv: Sequence[str], logs: str | None, *, parent: str = "runs", is_here: bool = True) -> Request:
    """Returns the request of the words after `--`.

    Args:
      argv: the words. If the first is `train`, they are a command of Spanax; otherwise a program and its arguments.
      logs: the folder of a program, from `--logs`; None for a new one.
      parent: the folder in which a new one is created.
      is_here: whether the program starts on this machine, so that it must be installed here.

    Raises:
      SpanaxError: there is no command, its program is not installed, or it is a command of Spanax that cannot be
        launched.

    Example:
      >>> request_of(["python", "train.py"], "logs/a", is_here=False)
      ProgramRequest(words=('python', 'train.py'), folder=PosixPath('logs/a'))
    """
    if not argv:
        raise MissingError(
            "there is no command to launch.",
            fix="-- python script.py, or -- train gpt-nano --steps 10, after the flags of launch",
        )
    if argv[0] == TRAIN:
        if logs is not None:
            raise ConflictError(
                f"--logs {logs} is for programs; the folder of `train` is its --output-dir.",
                fix=f"-- train ... --output-dir {logs}",
            )
        return TrainRequest.of(argv)
    check_path("--logs", logs)
    _check_program(argv, is_here)
    return ProgramRequest(tuple(argv), Path(logs) if logs is not None else new_folder(parent))


def new_folder(parent: str) -> Path:
    """Returns the path of a folder for a launch that names none."""
    return Path(parent, f"launched-{time.strftime('%Y%m%d-%H%M%S')}")


def scheduler_name(folder: Path) -> str:
    """Returns the name of a folder as lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "spanax"


def _check_program(argv: Sequence[str], is_here: bool) -> None:
    program = argv[0]
    if Path(program).name == "spanax" or (["-m"], ["spanax"]) == ([*argv[1:2]], [*argv[2:3]]):
        raise ConflictError(
            f"'-- {shlex.join(argv)[:80]}' would not be resumed after a restart.",
            fix="-- train ..., without 'spanax' before it",
        )
    if is_here and shutil.which(program) is None:
        fix = f"-- python {program}" if program.endswith(".py") else "-- python script.py, -- train ..., or a path"
        raise NotInstalledError(f"there is no program '{program}'.", where="the executables of PATH", fix=fix)


def count(name: str, value: int) -> int:
    """Validates a number of hosts or devices.

    Raises:
      SpanaxError: it is below 1.
    """
    if value < 1:
        raise RangeError(f"--{name} is {value}; expected an integer >= 1.", fix=f"--{name} 2")
    return value
