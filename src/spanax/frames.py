"""Classification of the files in a traceback as user code, libraries or Spanax."""

import functools
import sys
import sysconfig
import traceback
from pathlib import Path

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
OURS = Path(__file__).parent
"""The package folder of Spanax; the models in it are treated as user code."""
IN_MODELS = ("models", "stack", "losses.py", "step/kernels", "trace/kernels")
"""The code that models and losses run."""


@functools.cache
def package_of(file: str) -> str:
    """Returns the name of the installed package of a file; empty for other files.

    Example:
      >>> package_of("/x/site-packages/flax/nnx/nn/linear.py"), package_of("/home/me/model.py")
      ('flax', '')
    """
    parts = Path(file).parts
    installed = [index for index, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    return parts[installed[-1] + 1] if installed else ""


@functools.cache
def is_library(file: str) -> bool:
    """Returns whether a file belongs to Spanax, the standard library, or a library that models use.

    Example:
      >>> is_library("/x/site-packages/flax/nnx/nn/linear.py"), is_library("/x/site-packages/a_model/net.py")
      (True, False)
    """
    if Path(file).is_relative_to(OURS):
        return not _is_model(file)
    return _is_standard(file) or _is_command(file) or package_of(file) in LIBRARIES


@functools.cache
def is_user(file: str) -> bool:
    """Returns whether a file is user code: not installed, in the standard library, or in Spanax.

    Example:
      >>> is_user("/home/me/model.py"), is_user("/x/site-packages/a_model/net.py"), is_user("<string>")
      (True, False, False)
    """
    # Names such as <string> denote generated code, such as that of dataclasses and of the import system.
    is_file = not file.startswith("<")
    is_installed = _is_standard(file) or _is_command(file) or package_of(file) or Path(file).is_relative_to(OURS)
    return is_file and not is_installed


def user_frames(error: BaseException) -> traceback.StackSummary:
    """Returns the frames of user code, outermost first; empty if user code did not raise the error.

    User code raised the error if the innermost frame outside of libraries is in user code. Errors that Spanax raises
    when user code calls it are errors of Spanax. The location of a SyntaxError counts as a frame.

    Example:
      >>> user_frames(ValueError("no traceback"))
      []
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:
        # Code that cannot be compiled has no frame.
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>", line=error.text))
    decisive = [frame.filename for frame in frames if is_user(frame.filename) or is_spanax(frame.filename)]
    is_mistake = bool(decisive) and is_user(decisive[-1])
    return traceback.StackSummary.from_list([frame for frame in frames if is_mistake and is_user(frame.filename)])


@functools.cache
def is_spanax(file: str) -> bool:
    """Returns whether a file belongs to Spanax, other than to what models run: its models, and stacks of layers."""
    # Layers raise errors for arguments that user code passes to them.
    return Path(file).is_relative_to(OURS) and not any(Path(file).is_relative_to(OURS / name) for name in IN_MODELS)


def _is_model(file: str) -> bool:
    return Path(file).is_relative_to(OURS / "models")


def _is_command(file: str) -> bool:
    """Returns whether a file is an installed command, such as `bin/spanax` or `bin/pytest`."""
    return Path(file).parent == Path(sys.executable).parent


def _is_standard(file: str) -> bool:
    return Path(file).is_relative_to(sysconfig.get_path("stdlib")) and not package_of(file)
