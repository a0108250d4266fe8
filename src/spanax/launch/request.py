"""Parses the command after `--`: a `train ...` of Spanax, or a program of the user."""

import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spanax.errors import ConflictError, MissingError, NotInstalledError
from spanax.processes.gpu_memory import missing_setting
from spanax.train.config import TrainConfig, check, check_path, with_settings
from spanax.train.record.folder import read_config
from spanax.train.record.heartbeat import FOLDER_VARIABLE
from spanax.usage import parse_flags

TRAIN = "train"
"""The first word of a command of Spanax; any other first word is a program."""


@dataclass(frozen=True)
class Request:
    """A command to launch.

    Attributes:
      words: `train` and its arguments, including `--output-dir`; or a program and its arguments.
      folder: the run folder, or the folder for the logs, heartbeats and events of a program.

    Example:
      >>> request = request_of(["train", "gpt-nano", "--output-dir", "runs/a"], None)
      >>> request.folder, request.argv(is_again=True)
      (PosixPath('runs/a'), ['train', 'gpt-nano', '--output-dir', 'runs/a', '--resume'])
    """

    words: tuple[str, ...]
    folder: Path

    @property
    def is_program(self) -> bool:
        """Whether it is a program of the user."""
        return self.words[0] != TRAIN

    @property
    def name(self) -> str:
        """The folder's name for schedulers: lowercase letters, digits and dashes.

        Example:
          >>> Request(("train",), Path("runs/First_try")).name
          'first-try'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.folder.name.lower()).strip("-") or "spanax"

    def argv(self, *, is_again: bool) -> list[str]:
        """Returns the words for a process; a restart of `train` resumes from the newest checkpoint.

        Every attempt of a program has the same words: what it continues from is up to its own checkpoints.
        """
        resumes = is_again and not self.is_program and "--resume" not in self.words
        return [*self.words, *(["--resume"] if resumes else [])]

    def command(self, python: str, *, is_again: bool) -> list[str]:
        """Returns the command line of a process; a program itself decides which interpreter it uses."""
        return [*([] if self.is_program else [python, "-P", "-m", "spanax"]), *self.argv(is_again=is_again)]

    @property
    def flags(self) -> list[str]:
        """The flags of `launch` that belong to the request."""
        return ["--logs", str(self.folder)] if self.is_program else []

    @property
    def environment(self) -> dict[str, str]:
        """The environment that its processes need besides that of their group."""
        if not self.is_program:
            return missing_setting()
        # A killed process would lose the last lines of its log in Python's buffer.
        return missing_setting() | {FOLDER_VARIABLE: str(self.folder.absolute()), "PYTHONUNBUFFERED": "1"}


def request_of(argv: Sequence[str], logs: str | None) -> Request:
    """Returns the request of the words after `--`.

    Args:
      argv: the words. If the first is `train`, they are a command of Spanax; otherwise a program and its arguments.
      logs: the folder of a program, from `--logs`; None for a new one.

    Raises:
      SpanaxError: there is no command, its program is not installed, or it is a command of Spanax that cannot be
        launched.

    Example:
      >>> request_of(["sh", "train.sh"], "logs/a")
      Request(words=('sh', 'train.sh'), folder=PosixPath('logs/a'))
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
        return _train_request(argv)
    check_path("--logs", logs)
    _check_program(argv)
    return Request(tuple(argv), Path(logs) if logs is not None else _new_folder())


def _train_request(argv: Sequence[str]) -> Request:
    """Returns the request of a `train` command, which is checked before it waits in a queue."""
    config = check(parse_flags(TrainConfig, "train", argv[1:]))
    out = config.output_dir
    if out is None and config.config is not None:
        out = with_settings(TrainConfig(), read_config(Path(config.config)), config.config).output_dir
        check_path("--output-dir", out)
    if out is None:
        folder = _new_folder()
        return Request((*argv, "--output-dir", str(folder)), folder)
    return Request(tuple(argv), Path(out))


def _new_folder() -> Path:
    """Returns the path of a folder for a launch that names none."""
    return Path("runs", f"launched-{time.strftime('%Y%m%d-%H%M%S')}")


def _check_program(argv: Sequence[str]) -> None:
    program = argv[0]
    if Path(program).name == "spanax" or (["-m"], ["spanax"]) == ([*argv[1:2]], [*argv[2:3]]):
        raise ConflictError(
            f"'-- {shlex.join(argv)[:80]}' would not be resumed after a restart.",
            fix="-- train ..., without 'spanax' before it",
        )
    if shutil.which(program) is None:
        fix = f"-- python {program}" if program.endswith(".py") else "-- python script.py, -- train ..., or a path"
        raise NotInstalledError(f"there is no program '{program}'.", where="the executables of PATH", fix=fix)
