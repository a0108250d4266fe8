"""Live output on a terminal: a console that follows its size, a line of progress, and a progress bar with numbers."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, ConsoleDimensions, ConsoleOptions
from rich.live import Live
from rich.progress import BarColumn, ProgressColumn, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

ShowProgress = Callable[[str, bool], None]
"""Takes a line, and whether it stays on the terminal when the next one is shown."""

MORE = Text("…")
"""Replaces the numbers that do not fit."""

BAR_WIDTH = 8
"""Minimum width of the bar, unless the first number needs the space."""


def reserve_stdout() -> TextIO:
    """Returns a stream to standard output, and redirects file descriptor 1 to standard error.

    Libraries such as Gloo write to the descriptor at any time until the process ends; their output does not mix with
    JSON.
    """
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


class Terminal(Console):
    """A console that queries the size of its stream at each refresh, so that it follows a resized window.

    Rich queries only the standard streams. In a launched process none of them is the terminal: `reserve_stdout`
    duplicated standard output.
    """

    @property
    def size(self) -> ConsoleDimensions:
        """Columns and lines of the stream."""
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except OSError:  # also io.UnsupportedOperation: a stream without a file, as in a notebook
            return super().size
        # A terminal without a known size reports 0.
        return ConsoleDimensions(columns, lines) if columns and lines else super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


@contextmanager
def progress(stream: TextIO) -> Iterator[ShowProgress]:
    """Yields a callback that shows the progress of a command: a live line on a terminal, otherwise a line per change.

    Example:
      >>> with progress(sys.stdout) as show:
      ...     show("compiled 1 of 9", False)
      compiled 1 of 9
    """
    console = Terminal(file=stream)
    if not stream.isatty() or console.is_dumb_terminal:
        yield lambda text, stays: print(text, file=stream, flush=True)
        return
    # A refresh thread would take time from the steps that are measured.
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(text: str, stays: bool) -> None:
            if stays:
                console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

        yield show


class Numbers(ProgressColumn):
    """A bar, followed by the field `numbers` of a task, with elapsed and remaining time after the first number."""

    def __init__(self) -> None:
        self._elapsed = TimeElapsedColumn()
        self._remaining = TimeRemainingColumn(compact=True)
        super().__init__(Column(ratio=1))

    def render(self, task: Task) -> "Row":  # type: ignore[override]
        """Returns the bar and the numbers of a task."""
        first, *others = task.fields["numbers"]
        times = self._elapsed.render(task)
        remaining = self._remaining.render(task)
        if remaining:  # empty for a task without a total
            times = Text.assemble(times, " ETA ", remaining)
        return Row(task, [Text(first), times, *map(Text, others)])


class Row:
    """The bar of a task and texts in one line; texts that do not fit are omitted, not truncated."""

    def __init__(self, task: Task, texts: Sequence[Text]):
        self.task = task
        self.texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        line = fitting(self.texts, options.max_width - BAR_WIDTH - 1)
        if line is MORE:
            line = fitting(self.texts, options.max_width - 2)
        width = max(1, options.max_width - line.cell_len - 1)
        row = Table.grid(padding=(0, 1))
        row.add_row(BarColumn(bar_width=width).render(self.task), line)
        yield row


def fitting(texts: Sequence[Text], width: int) -> Text:
    """Returns the first texts that fit, in one line."""
    for count in range(len(texts), 0, -1):
        line = Text("  ").join([*texts[:count], *([MORE] * (count < len(texts)))])
        if line.cell_len <= width:
            return line
    return MORE
