"""Request: the command behind `--`, and the run folder that it names."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spanax.errors import SpanaxError


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
          SpanaxError: it is no `train`.
        """
        if not argv or argv[0] != "train":
            raise SpanaxError(
                f"launch runs 'train', and was given '{' '.join(argv[:1]) or 'nothing'}'.",
                fix="spanax launch local --hosts 2 -- train gpt-nano --steps 10",
            )
        args = [part for arg in argv[1:] for part in (arg.split("=", 1) if arg.startswith("--out=") else [arg])]
        if "--out" not in args:
            args += ["--out", f"runs/launched-{time.strftime('%Y%m%d-%H%M%S')}"]
        at = args.index("--out") + 1
        if at == len(args):
            raise SpanaxError("--out names no folder.", fix="--out runs/NAME")
        return TrainRequest(tuple(args), Path(args[at]))

    def argv(self, *, is_again: bool) -> list[str]:
        """The words to start a process of the run with; the second time it goes on from what is saved."""
        resume = ["--resume"] if is_again and "--resume" not in self.args else []
        return ["train", *self.args, *resume]
