"""What `FILE.py:NAME` names in a user's file."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from flax import nnx

from spanax.errors import UnknownNameError, nearest


def module_of(name: str, what: str) -> tuple[ModuleType, str]:
    """Runs the file of `FILE.py:NAME`, and returns its module and the name in it.

    Args:
      name: the path of the file, a colon, and the name.
      what: what it is, for the error.

    Raises:
      SpanaxError: there is no such file.
    """
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise UnknownNameError(f"'{name}' is no {what} of a file.", fix="file.py:name")
    if not Path(path).is_file():
        raise UnknownNameError(f"'{path}' does not exist.", where=f"{what} '{name}'")
    return _imported(Path(path)), attribute


def no_class(module: ModuleType, name: str) -> UnknownNameError:
    """Returns the error of a file that has no class of this name."""
    known = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nnx.Module)]
    fix = nearest(name, known) if known else f"class {name}(nnx.Module): ..."
    return UnknownNameError(f"'{module.__file__}' has no class '{name}'.", fix=fix)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    # Like `python file.py`, so that the file can import modules from its folder.
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
