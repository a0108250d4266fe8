"""Live output on a terminal: a console that follows its size, and the numbers of a progress bar."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import ProgressColumn, Task
from rich.text import Text


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


class Numbers(ProgressColumn):
    """The field `numbers` of a task in one line, the most important first; those that do not fit are left out whole."""

    def render(self, task: Task) -> RenderableType:
        """Returns the numbers of a task."""
        return _Fitting(task.fields["numbers"])


@dataclass(frozen=True)
class _Fitting:
    """The first of some texts that fit into the width of a column."""

    texts: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = ["  ".join(self.texts[:count]) for count in range(len(self.texts) + 1)]
        yield Text(max((line for line in lines if cell_len(line) <= options.max_width), key=len), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, options.max_width)
