"""The pages in docs/ that hold examples: each is run."""

import doctest
from pathlib import Path

import jax
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
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


def test_a_wrong_example_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("    >>> 1 + 1\n    3\n")
    found = doctest.testfile(str(tmp_path / "page.md"), module_relative=False, report=False, verbose=False)
    assert found.failed == 1
