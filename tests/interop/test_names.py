"""The public names of spanax.interop exist and have an example."""

import inspect
import subprocess
import sys

import pytest

import spanax.interop


@pytest.mark.parametrize("name", spanax.interop.__all__)
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    result = getattr(spanax.interop, name)
    reported = inspect.getdoc(result) or ""
    assert ">>>" in reported if inspect.isfunction(result) else "Attributes:" in reported


def test_nothing_heavy_is_imported_for_the_flags() -> None:
    code = "import sys, spanax.cli; print([name for name in ('jax', 'numpy', 'flax') if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240).stdout.strip() == "[]"
    )


def test_an_unknown_array_name_raises() -> None:
    with pytest.raises(AttributeError, match="no attribute 'imports'"):
        _ = spanax.interop.imports
