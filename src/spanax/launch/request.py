"""Request: the command behind `--`, and the run folder that it names."""

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
    """`train ...` as it was asked for, with a run folder.

    Attributes:
      args: what follows `train`, `--out` among it.
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
        """The request, with a folder of its own where it names none.

        Raises:
          SpanaxError: it is no `train`, or `train` would refuse it: a queue is a slow place to learn that.
        """
        if not argv or argv[0] != "train":
            shown = f"'-- {argv[0]} ...'" if argv else "nothing"
            raise SpanaxError(
                f"expected '-- train ...', got {shown}.",
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
        """A name for schedulers, from that of the folder: small letters, digits and dashes.

        Example:
          >>> TrainRequest.of(["train", "--out", "runs/First_try"]).name
          'first-try'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.folder.name.lower()).strip("-") or "spanax"

    def argv(self, *, is_again: bool) -> list[str]:
        """The words to start a process of the run with; the second time it goes on from what is saved."""
        resume = ["--resume"] if is_again and "--resume" not in self.args else []
        return ["train", *self.args, *resume]


def count(name: str, value: int) -> int:
    """A number of hosts or devices, if it is one.

    Raises:
      SpanaxError: it is not.
    """
    if value < 1:
        raise SpanaxError(f"--{name} is {value}; it takes a number from 1.", fix=f"--{name} 1")
    return value
