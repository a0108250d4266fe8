"""Parses the command after `--`, and the run folder that it names."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from spanax.errors import SpanaxError
from spanax.run.config import TrainConfig, check, check_path, with_settings
from spanax.run.record.folder import read_config


@dataclass(frozen=True)
class TrainRequest:
    """A `train ...` command with a run folder.

    Attributes:
      args: the arguments of `train`, including `--out`.
      folder: the run folder.

    Example:
      >>> request = TrainRequest.of(["train", "gpt-nano", "--out", "runs/a"])
      >>> request.folder, request.argv(is_again=True)
      (PosixPath('runs/a'), ['train', 'gpt-nano', '--out', 'runs/a', '--resume'])
    """

    args: tuple[str, ...]
    folder: Path

    @staticmethod
    def of(argv: Sequence[str]) -> "TrainRequest":
        """Returns the request, with a new run folder if it names none.

        Raises:
          SpanaxError: it is not a valid `train` command; this is checked before it waits in a queue.
        """
        if not argv or argv[0] != "train":
            received = f"'-- {argv[0]} ...'" if argv else "nothing"
            raise SpanaxError(
                f"expected '-- train ...', got {received}.",
                fix="-- train gpt-nano --steps 10 after the flags of launch",
            )
        args = list(argv[1:])
        config = check(tyro.cli(TrainConfig, prog="spanax train", args=args))
        out = config.out
        if out is None and config.config is not None:
            out = with_settings(TrainConfig(), read_config(Path(config.config)), config.config).out
            check_path("out", out)
        if out is None:
            out = f"runs/launched-{time.strftime('%Y%m%d-%H%M%S')}"
            args += ["--out", out]
        return TrainRequest(tuple(args), Path(out))

    @property
    def name(self) -> str:
        """The folder's name for schedulers: lowercase letters, digits and dashes.

        Example:
          >>> TrainRequest.of(["train", "--out", "runs/First_try"]).name
          'first-try'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.folder.name.lower()).strip("-") or "spanax"

    def argv(self, *, is_again: bool) -> list[str]:
        """Returns the arguments for a process of the run; a restart resumes from the newest checkpoint."""
        resume = ["--resume"] if is_again and "--resume" not in self.args else []
        return ["train", *self.args, *resume]


def count(name: str, value: int) -> int:
    """Validates a number of hosts or devices.

    Raises:
      SpanaxError: it is below 1.
    """
    if value < 1:
        raise SpanaxError(f"--{name} is {value}; expected an integer >= 1.", fix=f"--{name} 1")
    return value
