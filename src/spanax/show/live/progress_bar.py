"""A progress bar and the numbers beside it, as many of them as fit."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, ProgressColumn, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

GAP = "  "
MORE = Text("…")
"""Stands for the numbers that do not fit."""

BAR_WIDTH = 8
"""Columns that numbers leave to the bar, but the first of them."""


class Numbers(ProgressColumn):
    """A bar, and behind it the field `numbers` of a task with the times after the first of them."""

    def __init__(self) -> None:
        self._elapsed, self._remaining = TimeElapsedColumn(), TimeRemainingColumn(compact=True)
        super().__init__(Column(ratio=1))

    def render(self, task: Task) -> "Row":  # type: ignore[override]
        """The bar and numbers of a task."""
        first, *rest = task.fields["numbers"]
        times, remaining = self._elapsed.render(task), self._remaining.render(task)
        if remaining:  # of a task without a total nothing is known
            times = Text.assemble(times, " ETA ", remaining)
        return Row(task, [Text(first), times, *map(Text, rest)])


class Row:
    """The bar of a task and texts in one line: the last ones that do not fit are left out, none is cut."""

    def __init__(self, task: Task, texts: Sequence[Text]):
        self.task, self.texts = task, texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        line = fitting(self.texts, options.max_width - BAR_WIDTH - 1)
        if line is MORE:
            line = fitting(self.texts, options.max_width - 2)
        width = max(1, options.max_width - line.cell_len - 1)
        row = Table.grid(padding=(0, 1))
        row.add_row(BarColumn(bar_width=width).render(self.task), line)
        yield row


def fitting(texts: Sequence[Text], width: int) -> Text:
    """The first texts in one line, as many as fit.

    Example:
      >>> texts = [Text("loss 2.4512"), Text("0.031 s"), Text("accuracy 0.625")]
      >>> [str(fitting(texts, width)) for width in (36, 35, 22, 13)]
      ['loss 2.4512  0.031 s  accuracy 0.625', 'loss 2.4512  0.031 s  …', 'loss 2.4512  …', '…']
    """
    for count in range(len(texts), 0, -1):
        line = Text(GAP).join([*texts[:count], *([MORE] * (count < len(texts)))])
        if line.cell_len <= width:
            return line
    return MORE
