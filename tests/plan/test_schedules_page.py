"""docs/pipeline-schedules.md: every number and picture on it is what the code says (`make golden` writes them)."""

import os
import re
from pathlib import Path

from spanax.plan.pipeline.bubble import bubble_over_ideal, num_hops, num_in_flight
from spanax.plan.pipeline.schedules import SCHEDULES, orders
from spanax.plan.pipeline.timeline import StageSeconds, simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline-schedules.md"
CHUNKS = dict.fromkeys(SCHEDULES, 1) | {"interleaved": 2}
FORMULAS = {
    "gpipe": "(p - 1) / m",
    "1f1b": "(p - 1) / m",
    "interleaved": "(p - 1) / (v m)",
    "zero-bubble": "(p - 1)(F + B - W) / (m (F + B + W))",
}


def costs() -> str:
    rows = [
        "| schedule | bubble over work | here | of the step | held, first to last device |",
        "|---|---|---|---|---|",
    ]
    for name, chunks in CHUNKS.items():
        timeline = simulate(orders(name, 4, 8, chunks), StageSeconds.equal(4 * chunks))
        assert abs(timeline.bubble_over_ideal - bubble_over_ideal(name, 4, 8, chunks)) < 1e-12
        assert timeline.peak_in_flight == tuple(num_in_flight(name, 4, 8, chunks, stage=[0, 1, 2, 3]))
        held = ", ".join(f"{count / chunks:g}" for count in timeline.peak_in_flight)
        here = f"{timeline.bubble_over_ideal:.3f} | {timeline.bubble_fraction:.1%}"
        rows.append(f"| `{name}` | {FORMULAS[name]} | {here} | {held} |")
    return "\n".join(rows)


def hops() -> str:
    sizes = (4, 8, 16, 32, 64)
    rows = [f"| schedule | {' | '.join(f'm = {m}' for m in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for name, chunks in CHUNKS.items():
        counted = []
        for m in sizes:
            built, times = orders(name, 4, m, chunks), StageSeconds.equal(4 * chunks)
            counted.append((simulate(built, times, 0.25).seconds - simulate(built, times).seconds) / 0.25)
            assert counted[-1] == num_hops(name, 4, m, chunks)
        rows.append(f"| `{name}` | {' | '.join(f'{count:g}' for count in counted)} |")
    return "\n".join(rows)


def pictures() -> str:
    return "\n\n".join(f"`{name}`:\n\n{picture(name)}" for name in ("gpipe", "1f1b", "zero-bubble"))


def picture(schedule: str) -> str:
    timeline = simulate(orders(schedule, 4, 6), StageSeconds.equal(4))
    lines = []
    for order, starts, ends in zip(timeline.orders, timeline.start_seconds, timeline.end_seconds, strict=True):
        line = ["."] * int(timeline.seconds)
        for task, start, end in zip(order, starts, ends, strict=True):
            letter = {"F": "0123456789", "B": "abcdefghij", "W": "ABCDEFGHIJ"}[task.kind][task.microbatch]
            line[int(start) : int(end)] = letter * int(end - start)
        lines.append("    " + "".join(line))
    return "\n".join(lines)


def test_the_page_says_what_the_code_says() -> None:
    page = PAGE.read_text()
    for name, built in {"costs": costs(), "hops": hops(), "pictures": pictures()}.items():
        block = re.compile(rf"<!-- {name} -->\n.*?<!-- end -->|<!-- {name} -->", re.DOTALL)
        assert block.search(page), f"the page has no place for {name}"
        page = block.sub(f"<!-- {name} -->\n\n{built}\n\n<!-- end -->", page)
    if os.environ.get("SPANAX_GOLDEN") == "update":
        PAGE.write_text(page, newline="")
    assert page == PAGE.read_text(), "a number changed: `make golden`, then read the diff"


def test_the_example_on_the_page_says_what_it_prints() -> None:
    timeline = simulate(orders("1f1b", num_stages=4, num_microbatches=8), StageSeconds.equal(4))
    printed = f"{timeline.seconds}, {timeline.bubble_over_ideal}, {timeline.peak_in_flight}"
    assert f"# {printed}" in PAGE.read_text()
