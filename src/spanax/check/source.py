"""Source: which of the lines that an operation comes from is the user's own."""

import functools
import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
OURS = Path(__file__).resolve().parent.parent
"""Where Spanax lies; its models are read like a user's."""


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
    own = [line for line in traced if not _is_library(line[0])]
    for file, line in own or traced:
        return f"{file}:{line}"
    return ""


def _is_replay(file: str) -> bool:
    return Path(file).is_relative_to(OURS / "run")


@functools.cache
def _is_library(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(OURS):
        return not path.is_relative_to(OURS / "models")
    if path.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in path.parts:
        return True
    installed = [at for at, part in enumerate(path.parts) if part in ("site-packages", "dist-packages")]
    return bool(installed) and path.parts[installed[-1] + 1] in LIBRARIES
