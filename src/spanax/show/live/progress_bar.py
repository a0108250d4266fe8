"""A progress bar followed by the numbers that fit in the line."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, ProgressColumn, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

GAP = "  "
MORE = Text("…")
"""Replaces the numbers that do not fit."""

BAR_WIDTH = 8
"""Minimum width of the bar, unless the first number needs the space."""


class Numbers(ProgressColumn):
    """A bar, followed by the field `numbers` of a task, with elapsed and remaining time after the first number."""

    def __init__(self) -> None:
        self._elapsed, self._remaining = TimeElapsedColumn(), TimeRemainingColumn(compact=True)
        super().__init__(Column(ratio=1))

    def render(self, task: Task) -> "Row":  # type: ignore[override]
        """Returns the bar and the numbers of a task."""
        first, *others = task.fields["numbers"]
        times, remaining = self._elapsed.render(task), self._remaining.render(task)
        if remaining:  # empty for a task without a total
            times = Text.assemble(times, " ETA ", remaining)
        return Row(task, [Text(first), times, *map(Text, others)])


class Row:
    """The bar of a task and texts in one line; texts that do not fit are omitted, not truncated."""

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
    """Returns the first texts that fit, in one line.

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
