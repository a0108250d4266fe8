"""docs/pipelines.md: every number in its tables of schedules is what the code says (`make golden` writes them)."""

import os
import re
from pathlib import Path

from spanax.plan.pipeline.bubble import bubble_over_ideal, num_in_flight, step_seconds
from spanax.plan.pipeline.schedules import SCHEDULES, orders
from timeline import StageSeconds, simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipelines.md"
CHUNKS = dict.fromkeys(SCHEDULES, 1) | {"interleaved": 2}
FORMULAS = {
    "gpipe": "(p - 1) / m",
    "1f1b": "(p - 1) / m",
    "interleaved": "(p - 1) / (v m)",
    "zero-bubble": "(p - 1)(F + B - W) / (m (F + B + W))",
}


def costs() -> str:
    rows = [
        "| schedule | bubble over work | here | of the step | activations, first to last device |",
        "|---|---|---|---|---|",
    ]
    for name, chunks in CHUNKS.items():
        timeline = simulate(orders(name, 4, 8, chunks), StageSeconds.equal(4 * chunks))
        assert abs(timeline.bubble_over_ideal - bubble_over_ideal(name, 4, 8, chunks)) < 1e-12
        assert timeline.peak_in_flight[0] == num_in_flight(name, 4, 8, chunks)
        held = ", ".join(f"{count / chunks:g}" for count in timeline.peak_in_flight)
        here = f"{timeline.bubble_over_ideal:.3f} | {timeline.bubble_fraction:.1%}"
        rows.append(f"| `{name}` | {FORMULAS[name]} | {here} | {held} |")
    return "\n".join(rows)


def hops() -> str:
    sizes = (4, 8, 16, 64)
    rows = [f"| schedule | {' | '.join(f'm = {m}' for m in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for name, chunks in CHUNKS.items():
        counted = []
        for m in sizes:
            actual, times = orders(name, 4, m, chunks), StageSeconds.equal(4 * chunks)
            counted.append((simulate(actual, times, 0.25).seconds - simulate(actual, times).seconds) / 0.25)
            hop = step_seconds(name, 4, m, chunks, hop_seconds=0.25) - step_seconds(name, 4, m, chunks)
            assert counted[-1] == hop / 0.25
        rows.append(f"| `{name}` | {' | '.join(f'{count:g}' for count in counted)} |")
    return "\n".join(rows)


def test_the_page_equals_the_code() -> None:
    page = PAGE.read_text()
    for name, actual in {"costs": costs(), "hops": hops()}.items():
        block = re.compile(rf"(<!-- table: {name} \(make golden\) -->\n).*?(<!-- end -->)", re.DOTALL)
        assert block.search(page), f"the page has no place for {name}"
        page = block.sub(rf"\g<1>{actual}\n\g<2>", page)
    if os.environ.get("SPANAX_GOLDEN") == "update":
        PAGE.write_text(page, newline="")
    assert page == PAGE.read_text(), "a number changed: `make golden`, then read the diff"
