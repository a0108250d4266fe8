"""Draws pipeline schedules as timelines below each other on one scale."""

from collections.abc import Sequence

from drawings.canvas import EDGE, LINE, WIDTH, Diagram, Node, boxes, el, label
from spanax.plan.pipeline.schedules import KINDS, Kind
from spanax.plan.pipeline.ticks import Ticks

NAMES, ROW, GAP = 46, 15, 1
"""Units: width of the names of stages, height of a stage, and the gap between tasks."""

WORDS = {"F": "forward", "B": "backward", "W": "gradient of the weights"}

TASKS: dict[Kind, int] = {"F": 1, "B": 2, "W": 3}
"""By kind of task, the number of its color."""


LABELS = ("0123456789", "abcdefghij")
"""By chunk of a stage, the labels of microbatches."""


def schedules_diagram(tables: Sequence[Ticks], title: str) -> Diagram:
    """Returns timelines of schedules; a forward, an input gradient and a weight gradient of a layer take equal time.

    A schedule whose backward pass computes both gradients takes two units for it; a chunk of a stage takes its share.
    """
    longest = max(_spans(table)[-1][1] for table in tables)
    unit = (WIDTH - 2 * EDGE - NAMES) / longest
    nodes, top, texts = [label(EDGE, EDGE + 11, title, "t")], EDGE + LINE + 6.0, []
    for table in tables:
        idle = f"{100 * table.bubble_fraction:.0f} % idle"
        chunks = f" ({table.num_chunks} chunks)" if table.num_chunks > 1 else ""
        head = (
            f"{table.schedule}{chunks}: {idle}, activations of {table.num_in_flight / table.num_chunks:g} microbatches"
        )
        texts.append(head)
        nodes += [label(EDGE, top + 10, head, "s b"), *_rows(table, unit, top + LINE)]
        top += LINE + table.num_stages * ROW + 8
    nodes += _legend(tables, top)
    counts = f"{tables[0].num_stages} stages, {tables[0].num_microbatches} microbatches"
    return Diagram(title, f"{counts}. {'; '.join(texts)}.", nodes, top + 2 * LINE + 4)


def _spans(table: Ticks) -> list[tuple[float, float]]:
    """Returns the start and end of each tick: all stages wait for its longest task."""
    spans, now = [], 0.0
    for row in table.tasks:
        lengths = [2.0 if task.kind == "B" and not table.is_split else 1.0 for task in row if task is not None]
        spans.append((now, now := now + max(lengths) / table.num_chunks))
    return spans


def _rows(table: Ticks, unit: float, top: float) -> list[Node]:
    """Returns the tasks of each stage with their microbatch: a digit, and in a second chunk of the stage a letter."""
    spans, left = _spans(table), EDGE + NAMES
    idle = [(left, top + stage * ROW, unit * spans[-1][1], ROW - 2.0) for stage in range(table.num_stages)]
    nodes, areas = [boxes(idle, "idle")], dict[Kind, list[tuple[float, float, float, float]]]()
    digits: list[Node] = []
    for stage in range(table.num_stages):
        y = top + stage * ROW
        nodes.append(label(EDGE, y + 10, f"stage {stage}", "q"))
        for chunk in range(table.num_chunks):
            for kind in KINDS:
                tasks = [
                    (start, end, row[stage])
                    for (start, end), row in zip(spans, table.tasks, strict=True)
                    if row[stage] is not None and row[stage].kind == kind and row[stage].chunk == chunk  # type: ignore[union-attr]
                ]
                xs = [left + unit * start for start, _, _ in tasks]
                widths = [unit * (end - start) - GAP for start, end, _ in tasks]
                areas.setdefault(kind, []).extend((x, y, width, ROW - 2.0) for x, width in zip(xs, widths, strict=True))
                middles = " ".join(f"{x + width / 2:.1f}" for x, width in zip(xs, widths, strict=True))
                text = "".join(LABELS[chunk % 2][task.microbatch % 10] for _, _, task in tasks if task is not None)
                if text:
                    digits.append(el("text", text, x=middles, y=f"{y + 10:.0f}", class_=f"o{TASKS[kind]} m"))
    nodes += [boxes(area, f"c{TASKS[kind]}") for kind, area in areas.items() if area]
    return nodes + digits


def _legend(tables: Sequence[Ticks], top: float) -> list[Node]:
    nodes, left = list[Node](), float(EDGE)
    for kind in KINDS:
        word = WORDS[kind]
        if any(task and task.kind == kind for table in tables for row in table.tasks for task in row):
            nodes += [boxes([(left, top, 11.0, 11.0)], f"c{TASKS[kind]}"), label(left + 15, top + 10, word, "s")]
            left += 24 + 5.6 * len(word)
    nodes += [boxes([(left, top, 11.0, 11.0)], "idle"), label(left + 15, top + 10, "idle", "s")]
    numbers = "Digits are microbatches"
    if any(table.num_chunks > 1 for table in tables):
        numbers += "; letters: the second chunk of a stage (a is 0)"
    nodes.append(label(EDGE, top + LINE + 10, f"{numbers}.", "s q"))
    return nodes
