"""A headless Chromium for tests of pages. A test module that imports this one is skipped where there is no browser."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason='no Playwright: pip install "spanax[browser]"')
EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if EXECUTABLE is None:
    pytest.skip("no browser: apt-get install chromium", allow_module_level=True)


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts the browser without its sandbox, which root in a container cannot use; the pages are Spanax's."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield browser
        browser.close()
