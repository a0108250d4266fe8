"""Shows what a command does while it computes its answer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TextIO

from rich.live import Live
from rich.text import Text

from spanax.displays import told_to
from spanax.show.live.terminal import Terminal

INTERVAL_SECONDS = 10.0
"""The time between two lines where they stay: in a pipe or a file."""


@contextmanager
def waiting(stream: TextIO, interval_seconds: float = INTERVAL_SECONDS) -> Iterator[None]:
    """Shows what `spanax.displays.doing` reports: one live line on a terminal, else a line every ten seconds.

    Args:
      stream: where to show it; not where the answer is printed.
      interval_seconds: the time between two lines that stay.

    Example:
      >>> import sys
      >>> from spanax.displays import doing
      >>> with waiting(sys.stdout, interval_seconds=0.2):
      ...     doing("tracing the step")
      ...     time.sleep(0.3)
      0 s: tracing the step
    """
    began = time.monotonic()
    latest = ["starting"]
    is_done = Event()
    console = Terminal(file=stream)

    def line() -> str:
        return f"{time.monotonic() - began:.0f} s: {latest[0]}"

    def print_lines() -> None:
        while not is_done.wait(interval_seconds):
            print(line(), file=stream, flush=True)

    def show(text: str) -> None:
        latest[0] = text

    if stream.isatty() and not console.is_dumb_terminal:
        text = lambda: Text(line(), no_wrap=True, overflow="ellipsis")  # noqa: E731
        with Live(get_renderable=text, console=console, transient=True), told_to(show):
            yield
        return
    thread = Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        with told_to(show):
            yield
    finally:
        is_done.set()
        thread.join()
