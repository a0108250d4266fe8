"""Progress of a long command: a live line on a terminal, otherwise one line per change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

ShowProgress = Callable[[str, bool], None]
"""Takes a line, and whether it stays on the terminal when the next one is shown."""


@contextmanager
def progress(stream: TextIO) -> Iterator[ShowProgress]:
    """Yields a callback that shows the progress of a command.

    Example:
      >>> import sys
      >>> with progress(sys.stdout) as show:
      ...     show("compiled 1 of 9", False)
      compiled 1 of 9
    """
    from spanax.show.live.terminal import Terminal

    console = Terminal(file=stream)
    if not stream.isatty() or console.is_dumb_terminal:
        yield lambda text, stays: print(text, file=stream, flush=True)
        return

    from rich.live import Live
    from rich.text import Text

    # A refresh thread would take time from the steps that are measured.
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(text: str, stays: bool) -> None:
            if stays:
                console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

        yield show


def remaining_text(seconds: float) -> str:
    """Returns an estimate of the remaining time in seconds, minutes or hours.

    Example:
      >>> remaining_text(0.2), remaining_text(39.7), remaining_text(200), remaining_text(4700)
      ('about 1 s remaining', 'about 40 s remaining', 'about 3 min remaining', 'about 1 h 18 min remaining')
    """
    if round(seconds) < 60:
        return f"about {max(1, round(seconds))} s remaining"
    minutes = round(seconds / 60)
    return f"about {minutes} min remaining" if minutes < 60 else f"about {minutes // 60} h {minutes % 60} min remaining"
