"""A terminal for live output: a console whose size is that of the stream it writes to."""

import os

from rich.console import Console, ConsoleDimensions


class Terminal(Console):
    """A console that asks its own stream for the size at each refresh, so that it follows a resized window.

    Rich asks the standard streams alone. In a launched process none of them is the terminal: standard output was
    duplicated to keep it free of what C++ libraries print.
    """

    @property
    def size(self) -> ConsoleDimensions:
        """The columns and lines of the stream."""
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except OSError:  # also io.UnsupportedOperation: a stream without a file, as in a notebook
            return super().size
        # A terminal that does not know its size reports 0.
        return ConsoleDimensions(columns, lines) if columns and lines else super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size
