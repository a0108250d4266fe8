"""The pages in docs/ that hold examples: each is run."""

import doctest
import re
from pathlib import Path

import jax
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
TESTS = DOCS.parent / "tests"
RUNNING = {"checking.md"}
"""Pages whose examples run a step."""

PAGES = sorted(page.name for page in DOCS.glob("*.md") if "\n    >>> " in page.read_text())


def test_some_pages_hold_examples() -> None:
    assert "planning.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page: str) -> None:
    if page in RUNNING:
        try:
            jax.devices()
        except RuntimeError:
            pytest.skip("JAX can start no backend here")
    found = doctest.testfile(str(DOCS / page), module_relative=False, encoding="utf-8")
    assert found.attempted > 0 and found.failed == 0


def unknown_tests(text: str) -> list[str]:
    """What a page calls a test, and is none."""
    named = re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?", text)
    files = {path: path.read_text() for path in TESTS.rglob("test_*.py")}

    def is_known(file: str, test: str) -> bool:
        return any(path.match(file) and (not test or f"def {test}(" in said) for path, said in files.items())

    return [f"{file}::{test}" for file, test in named if not is_known(file, test)]


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md") if "test_" in page.read_text()))
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    assert not unknown_tests((DOCS / page).read_text())


def test_a_test_that_does_not_exist_is_found() -> None:
    text = "`tests/test_docs.py::test_a_wrong_example_is_found`, `test_docs.py::no`, `tests/run/test_docs.py`"
    assert unknown_tests(text) == ["test_docs.py::no", "run/test_docs.py::"]


def test_a_wrong_example_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("    >>> 1 + 1\n    3\n")
    found = doctest.testfile(str(tmp_path / "page.md"), module_relative=False, report=False, verbose=False)
    assert found.failed == 1
