"""Source: which of the lines that an operation comes from is the user's own."""

import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
OURS = Path(__file__).resolve().parent.parent
"""Where Spanax lies; its models are read like a user's."""


def user_line(lines: Sequence[tuple[str, int]]) -> str:
    """The innermost `file:line` outside of JAX, Flax, Optax and Spanax, or the innermost of all; empty for none.

    Example:
      >>> user_line([("/x/site-packages/flax/nnx/nn/linear.py", 3), ("/home/me/model.py", 12)])
      '/home/me/model.py:12'
    """
    own = [line for line in lines if not _is_library(line[0])]
    for file, line in own or lines:
        return f"{file}:{line}"
    return ""


@functools.cache
def _is_library(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(OURS):
        return not path.is_relative_to(OURS / "models")
    if path.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in path.parts:
        return True
    installed = [at for at, part in enumerate(path.parts) if part in ("site-packages", "dist-packages")]
    return bool(installed) and path.parts[installed[-1] + 1] in LIBRARIES
