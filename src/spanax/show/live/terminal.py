"""A Rich console that takes its size from the stream it writes to."""

import os

from rich.console import Console, ConsoleDimensions


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
