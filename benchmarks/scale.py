"""Scale on paper: what the planner says of large models on 16 to 4,096 chips, without one of them.

Weak scaling gives every device so many tokens, strong scaling divides one batch among all. Attention is the platform's
kernel. With `--compile` planned layouts are compiled for TPUs too (`pip install "spanax[tpu]"`), minutes each.

    python benchmarks/scale.py [--only llama3-8b v5p] [--json FILE] [--write notes/scale.md] [--svg notes/scale.svg]
    python benchmarks/scale.py --compile "llama3-8b v5p weak 4096" ...
    python benchmarks/scale.py --published       # beside what others have measured
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import spanax  # noqa: E402
from generated_tables import write_table  # noqa: E402
from spanax.models.workloads import load  # noqa: E402
from spanax.plan.candidate import Search, plan_of, shortfall  # noqa: E402
from spanax.plan.evaluate import evaluated  # noqa: E402
from spanax.units import bytes_text  # noqa: E402

MODELS = ("gpt2-xl", "llama3-8b")

CHIPS = ("h100", "v5p")
DEVICES = (16, 256, 4096)
TOKENS = {"weak": 16_384, "strong": 4_194_304}
"""In a step: of each device, and of all."""

BEGIN = "<!-- the table: benchmarks/scale.py -->"


@dataclass(frozen=True)
class Point:
    """One model on so many chips, planned.

    Bytes and seconds are of one device and one step; `layout` is None where nothing fits, and `why` says by how much.
    """

    model: str
    chip: str
    scaling: str
    devices: int
    batch: int
    layout: str | None = None
    mesh: str = ""
    stages: int = 1
    remat: str = ""
    microbatches: int = 1
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    peak_bytes: int = 0
    moved_bytes: int = 0
    moved: dict[str, int] | None = None
    waits: float = 0.0
    why: str = ""

    @property
    def name(self) -> str:
        """How it is asked for."""
        return f"{self.model} {self.chip} {self.scaling} {self.devices}"


def asked() -> Iterator[Point]:
    """Every point, not yet planned; a batch is whole sequences, one at least."""
    lengths = {model: load(model, batch_size=1).batch["inputs"].shape[1] for model in MODELS}
    for model, length in lengths.items():
        for chip in CHIPS:
            for scaling, tokens in TOKENS.items():
                for devices in DEVICES:
                    batch = tokens * (devices if scaling == "weak" else 1) // length
                    yield Point(model, chip, scaling, devices, batch)


def searched(point: Point) -> Search:
    """Every layout of a point, priced."""
    workload = load(point.model, batch_size=point.batch)
    program = workload.trace(learning_rate=1e-4, num_steps=10, compute_dtype="bfloat16")
    return spanax.search(program, spanax.cluster(point.chip, point.devices), attention="auto", top=1)


def planned(point: Point, found: Search) -> Point:
    """The point with the fastest layout that fits, if any does."""
    given = {name: getattr(point, name) for name in ("model", "chip", "scaling", "devices", "batch")}
    best = found.best
    if best is None:
        return Point(**given, why=shortfall(found))
    rates, moved = found.rates(best), evaluated(found, best).collectives
    waits = sum(seconds for name, seconds in best.seconds.items() if "between devices" in name or "sync" in name)
    by_axes = {axes: sum(kinds.values()) for axes, kinds in moved.items()}
    return Point(
        **given, layout=best.layout, mesh=str(best.mesh), stages=best.num_stages, remat=best.remat,
        microbatches=best.microbatches, step_seconds=best.step_seconds, tokens_per_second=rates.tokens_per_second,
        mfu=rates.mfu, peak_bytes=best.peak_bytes, moved_bytes=sum(by_axes.values()), moved=by_axes,
        waits=waits / best.step_seconds,
    )  # fmt: skip


def row(one: Point) -> str:
    """One line of the table in Markdown."""
    head = [one.model, one.chip, one.scaling, f"{one.devices:,}", f"{one.batch:,}"]
    if one.layout is None:
        return "| " + " | ".join([*head, one.why, "", "", "", "", ""]) + " |"
    mesh = one.mesh + (f", {one.stages} stages" if one.stages > 1 else "")
    how = f"{one.remat}, {one.microbatches}"
    tail = [f"{one.layout} ({mesh})", how, f"{100 * one.mfu:.1f}", f"{100 * one.waits:.0f}"]
    return "| " + " | ".join([*head, *tail, bytes_text(one.peak_bytes), f"{one.moved_bytes / 2**30:.1f}"]) + " |"


def table(points: Sequence[Point]) -> str:
    """All of them in Markdown."""
    names = [
        "model", "chip", "scaling", "devices", "sequences", "layout", "remat, microbatches", "MFU, %", "waits, %",
        "memory a device", "moved, GiB",
    ]  # fmt: skip
    return "\n".join(["| " + " | ".join(names) + " |", "|" + "---|" * len(names), *map(row, points)])


PUBLISHED = (
    ("torchtitan, table 3, compiled", "llama3.1-8b", 8192, "h100:16x8", 256, "fsdp=128", "dots", 6514),
    ("torchtitan, async TP report", "llama3.1-8b", 8192, "h100:8x8", 96, "fsdp=8,model=8", "dots", 4378),
    ("torchtitan, async TP report", "llama3-70b", 8192, "h100:32x8", 512, "fsdp=32,model=8", "full", 597.3),
    ("MaxText, tiering page", "llama3-70b", 4096, "v5p:512", 1024, None, None, 692),
)
"""Source, model, sequence, devices, batch, mesh, remat (None: not stated, the planner's own) and tokens/s a device.

Llama 2 70B stands in as Llama 3 70B, whose vocabulary is four times as large.
"""


def published() -> str:
    """What the planner says of steps that others have measured, in Markdown."""
    names = ["source", "model", "devices", "layout", "tokens/s a device, planned", "measured", "planned : measured"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for source, model, length, on, batch, mesh, remat, measured in PUBLISHED:
        workload = load(model, batch_size=batch, seq_len=length)
        program = workload.trace(learning_rate=1e-4, num_steps=10, compute_dtype="bfloat16")
        given = {"mesh": mesh, "microbatches": 1, "remat": (remat,)} if remat else {}
        found = spanax.search(program, spanax.cluster(on), attention="auto", top=1, **given)
        assert found.best is not None
        planned = (found.rates(found.best).tokens_per_second or 0.0) / found.cluster.num_devices
        layout = f"{found.best.layout} ({found.best.mesh}), {found.best.remat}"
        cells = [source, model, on, layout, f"{planned:,.0f}", f"{measured:,.0f}", f"{planned / measured:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


COLOURS = dict(zip(MODELS, ("#0a7", "#06c"), strict=True))


def svg(points: Sequence[Point]) -> str:
    """MFU over devices, a panel for each chip and kind of scaling, a line for each model."""
    wide, high, margin = 330, 230, 42
    parts = []
    panels = [(chip, scaling) for chip in CHIPS for scaling in TOKENS]
    for at, (chip, scaling) in enumerate(panels):
        left, top = at % 2 * wide, at // 2 * high
        parts.append(f'<text x="{left + margin}" y="{top + 18}">{chip}, {scaling} scaling: MFU in %</text>')
        across = lambda devices, left=left: (  # noqa: E731
            left + margin + DEVICES.index(devices) / (len(DEVICES) - 1) * (wide - 2 * margin)
        )
        down = lambda share, top=top: top + high - margin - share / 0.7 * (high - 2 * margin)  # noqa: E731
        for share in (0.0, 0.2, 0.4, 0.6):
            y = down(share)
            parts.append(f'<path d="M{left + margin} {y:.1f}H{left + wide - margin}" stroke="#8884"/>')
            parts.append(f'<text x="{left + margin - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f}</text>')
        for devices in DEVICES:
            x = across(devices)
            parts.append(f'<text x="{x:.1f}" y="{top + high - margin + 16}" text-anchor="middle">{devices:,}</text>')
        for model, colour in COLOURS.items():
            line = [one for one in points if (one.model, one.chip, one.scaling) == (model, chip, scaling)]
            spots = [(across(one.devices), down(one.mfu)) for one in line if one.layout]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
    for at, (model, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{margin + at * 150}" y="{2 * high + 12}" fill="{colour}">{model}</text>')
    size = f'viewBox="0 0 {2 * wide} {2 * high + 24}" font-family="sans-serif" font-size="11" fill="#888"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


def compiled(point: Point) -> dict[str, Any]:
    """The planned layout beside what the chips' compiler makes of it."""
    found = searched(point)
    if found.best is None:
        return asdict(planned(point, found))
    program = next(iter(found.programs.values()))
    plan = plan_of(found, found.best)
    report = spanax.check(program, plan, found.cluster, level=3, timeout=3600.0)
    told = {"fits": report.fits, "compile_seconds": report.seconds, "compiled_peak_bytes": report.compiled.peak_bytes}
    return asdict(planned(point, found)) | told


def main() -> None:
    """Plan them all, or compile some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that are all in a point's name")
    parser.add_argument("--json", type=Path, help="write every point to this file")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    parser.add_argument("--compile", nargs="*", default=[], metavar="NAME", help="compile these, a line of JSON each")
    parser.add_argument("--published", action="store_true", help="plan what others have measured, and nothing else")
    given = parser.parse_args()
    if given.published:
        print(published())
        return
    chosen = [one for one in asked() if set(given.only) <= {*one.name.split()}]
    if given.compile:
        for one in chosen:
            if one.name in given.compile:
                print(json.dumps(compiled(one)), flush=True)
        return
    points = []
    for one in chosen:
        points.append(planned(one, searched(one)))
        print(row(points[-1]), file=sys.stderr, flush=True)
    print(table(points))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in points], indent=1) + "\n")
    if given.svg:
        given.svg.write_text(svg(points))
    if given.write:
        write_table(given.write, BEGIN, table(points))


if __name__ == "__main__":
    main()
