"""Draws the schedule of a pipeline as a grid with one row per stage and one column per tick."""

from spanax.plan.pipeline.schedules import Task
from spanax.plan.pipeline.ticks import Ticks
from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.tables import scrolled

CELL, GAP, LABEL = 26, 2, 58
"""Pixels: width of a cell with its gap, the gap, and width of the stage labels."""

MAX_CELLS = 4000
"""Number of cells drawn; of a longer schedule, those of the first ticks."""

WORDS = {"F": "forward", "B": "backward", "W": "gradient of the weights"}


def schedule_grid(table: Ticks) -> Node:
    """Returns the task of each stage at each tick in color, with the idle fraction and activations in memory."""
    shown = max(1, min(table.num_ticks, MAX_CELLS // table.num_stages))
    width, height = LABEL + shown * CELL, table.num_stages * CELL
    idle = 100 * table.bubble_fraction
    label = (
        f"{table.schedule}: {table.num_stages} stages, {table.num_microbatches} microbatches, {table.num_ticks} ticks, "
        f"{idle:.0f} % of them idle"
    )
    picture = el("svg", width=width, height=height, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)
    for stage in range(table.num_stages):
        fill(picture, el("text", f"stage {stage}", x=0, y=stage * CELL + 17, class_="label"))
        for tick, row in enumerate(table.tasks[:shown]):
            left, top, size = LABEL + tick * CELL, stage * CELL, CELL - GAP
            fill(picture, _cell(row[stage], table.num_chunks, left, top, size, tick))
    kinds = [kind for kind in WORDS if any(task and task.kind == kind for row in table.tasks for task in row)]
    keys = [el("span", el("span", class_=f"swatch task-{kind.lower()}"), WORDS[kind]) for kind in kinds]
    keys.append(el("span", el("span", class_="swatch task-idle"), f"idle, {idle:.0f} %"))
    note_text = f" Shows the first {shown:,} of {table.num_ticks:,} ticks." if shown < table.num_ticks else ""
    numbers = "A number is the microbatch" + (", and after it the chunk." if table.num_chunks > 1 else ".")
    note = el(
        "p", f"{numbers} Activations of at most {table.num_in_flight} are in memory at once.{note_text}", class_="note"
    )
    return el("figure", el("figcaption", *keys), scrolled(f"schedule {table.schedule}", picture), note, class_="ticks")


def _cell(task: Task | None, num_chunks: int, left: int, top: int, size: int, tick: int) -> Node:
    if task is None:
        return el("rect", x=left, y=top, width=size, height=size, rx=3, class_="task-idle")
    label = f"{task.microbatch}" + (f".{task.chunk}" if num_chunks > 1 else "")
    title = el("title", f"tick {tick}: {WORDS[task.kind]} of microbatch {task.microbatch}")
    box = el("rect", x=left, y=top, width=size, height=size, rx=3)
    return el("g", title, box, el("text", label, x=left + size / 2, y=top + 16), class_=f"task-{task.kind.lower()}")
