"""Tells the user's files in a traceback from those of libraries and of Spanax."""

import functools
import sysconfig
import traceback
from pathlib import Path

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
OURS = Path(__file__).parent
"""The package folder of Spanax; its models are read like a user's."""


@functools.cache
def package_of(file: str) -> str:
    """The name of the installed package that a file is in; empty for other files.

    Example:
      >>> package_of("/x/site-packages/flax/nnx/nn/linear.py"), package_of("/home/me/model.py")
      ('flax', '')
    """
    parts = Path(file).parts
    installed = [index for index, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    return parts[installed[-1] + 1] if installed else ""


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file belongs to Spanax, the standard library, or a library that models are written with.

    Example:
      >>> is_library("/x/site-packages/flax/nnx/nn/linear.py"), is_library("/x/site-packages/a_model/net.py")
      (True, False)
    """
    if Path(file).is_relative_to(OURS):
        return not _is_model(file)
    return _is_standard(file) or package_of(file) in LIBRARIES


@functools.cache
def is_user(file: str) -> bool:
    """Whether a file is the user's own: neither installed, nor of the standard library, nor of Spanax.

    Example:
      >>> is_user("/home/me/model.py"), is_user("/x/site-packages/a_model/net.py"), is_user("<string>")
      (True, False, False)
    """
    # Names such as <string> stand for generated code: of a dataclass, or of the import system.
    is_file = not file.startswith("<")
    return is_file and not (_is_standard(file) or package_of(file) or Path(file).is_relative_to(OURS))


def user_frames(error: BaseException) -> traceback.StackSummary:
    """The frames of the user's files, outermost first; empty if the error was not raised by the user's code.

    The user's code raised if the innermost frame outside of libraries is the user's: an error that Spanax raises while
    user code calls it is an error of Spanax. The place of a SyntaxError counts as a frame.

    Example:
      >>> user_frames(ValueError("no traceback"))
      []
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:
        # Code that cannot be compiled has no frame.
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "", line=error.text))
    decisive = [frame.filename for frame in frames if is_user(frame.filename) or _is_spanax(frame.filename)]
    is_mistake = bool(decisive) and is_user(decisive[-1])
    return traceback.StackSummary.from_list([frame for frame in frames if is_mistake and is_user(frame.filename)])


def _is_spanax(file: str) -> bool:
    # A layer of a built-in model raises for what the user's code passes to it.
    return Path(file).is_relative_to(OURS) and not _is_model(file)


def _is_model(file: str) -> bool:
    return Path(file).is_relative_to(OURS / "models")


def _is_standard(file: str) -> bool:
    return Path(file).is_relative_to(sysconfig.get_path("stdlib")) and not package_of(file)
