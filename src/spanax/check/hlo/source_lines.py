"""Attributes operations of a compiled program to lines of the user's code."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from spanax.frames import OURS, is_library


def user_line(lines: Sequence[tuple[str, int]]) -> str:
    """Returns the innermost `file:line` of the user's code, or else of a library; empty if there is none.

    Frames outside of the replayed step belong to its caller, not to the model, and are ignored.

    Example:
      >>> user_line([("/x/site-packages/flax/nnx/nn/linear.py", 3), ("/home/me/model.py", 12)])
      '/home/me/model.py:12'
      >>> user_line([(str(OURS / "run" / "replay.py"), 3), ("/home/me/train.py", 12)])
      ''
    """
    traced = list(itertools.takewhile(lambda line: not Path(line[0]).is_relative_to(OURS / "run"), lines))
    user_lines = [line for line in traced if not is_library(line[0])]
    for file, line in user_lines or traced:
        return f"{file}:{line}"
    return ""
