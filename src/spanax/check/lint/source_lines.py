"""Source: which of the lines that an operation comes from is the user's own."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from spanax.frames import OURS, is_library


def user_line(lines: Sequence[tuple[str, int]]) -> str:
    """The innermost `file:line` of the user's code, or else of the library that it calls; empty for none.

    What lies around the replay of a step is whoever asked for it, and no line of the model.

    Example:
      >>> user_line([("/x/site-packages/flax/nnx/nn/linear.py", 3), ("/home/me/model.py", 12)])
      '/home/me/model.py:12'
      >>> user_line([(str(OURS / "run" / "replay.py"), 3), ("/home/me/train.py", 12)])
      ''
    """
    traced = list(itertools.takewhile(lambda line: not _is_replay(line[0]), lines))
    own = [line for line in traced if not is_library(line[0])]
    for file, line in own or traced:
        return f"{file}:{line}"
    return ""


def _is_replay(file: str) -> bool:
    return Path(file).is_relative_to(OURS / "run")
