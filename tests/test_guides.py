"""The tables of the guides: every number equals that of the planner (`make golden` updates them)."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import generated_pages
import spanax
from sampling import sampled
from spanax.models.workloads import load
from spanax.plan import choose
from spanax.plan.advice.rules_of_thumb import rule
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.candidates.request import Request
from spanax.plan.evaluate import evaluated
from spanax.trace.program import Program

DOCS = Path(__file__).resolve().parents[1] / "docs"
TOLERANCE = 0.05
"""By how much a number may differ: JAX's versions trace some operations otherwise."""

MARK = r"(<!-- table: {name} \(make golden\) -->\n)(.*?)(<!-- end -->)"
GIB = 2**30


@functools.cache
def traced(workload: str, batch_size: int) -> Program:
    built = load(workload, batch_size=batch_size)
    return built.trace(learning_rate=1e-4, num_steps=100, compute_dtype=jnp.bfloat16)


@functools.cache
def searched(workload: str, batch_size: int, on: str) -> Search:
    return spanax.search(traced(workload, batch_size), spanax.cluster(on), top=5000, attention="auto")


def table(*rows: tuple[object, ...]) -> str:
    head, *body = ([str(cell) for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def state(candidate: Candidate) -> float:
    return sum(candidate.memory[name] for name in ("parameters", "optimizer", "other state"))


def layouts(
    workload: str, batch_size: int, on: str, rows: list[tuple[str, str]], *, remat: tuple[str, ...] | None = None
) -> str:
    """Layouts of one workload on one machine, each with its fastest schedule: memory, communication, step time."""
    lines: list[tuple[object, ...]] = [("layout", "remat", "peak memory (state)", "communication per step", "step")]
    for layout, mesh in rows:
        search_result = spanax.search(
            traced(workload, batch_size), spanax.cluster(on), layout=layout, mesh=mesh, remat=remat, pipeline=False,
            attention="auto",
        )  # fmt: skip
        item = next(iter((*search_result.candidates, *search_result.nearest)))
        moved = {axes: sum(kinds.values()) / GIB for axes, kinds in evaluated(search_result, item).collectives.items()}
        reported = ", ".join(f"{size:.2f} GiB over {axes}" for axes, size in moved.items() if size > 0.005) or "nothing"
        held = f"{item.peak_bytes / GIB:.1f} GiB ({state(item) / GIB:.2f})"
        held += "" if item in search_result.candidates else ", **too much**"
        parts = f", {item.microbatches} microbatches" if item.microbatches > 1 else ""
        lines.append((f"`{layout}` on `{mesh}`", f"{item.remat}{parts}", held, reported, f"{item.step_seconds:.3g} s"))
    return table(*lines)


CHOICES = [
    ("gpt2", 128, "h100:8"),
    ("gpt2-xl", 128, "v5e:4x4"),
    ("llama3-8b", 64, "h100:8"),
    ("llama3-8b", 128, "h100:8x8"),
    ("llama3-70b", 256, "v5p:4x4x8"),
    ("mixtral-8x7b", 128, "h100:8x8"),
    ("gpt3-175b", 1536, "a100-80gb:64x8"),
]


def choices() -> str:
    """What the planner takes, and the rule that it follows."""
    lines: list[tuple[object, ...]] = [("workload, batch", "machine", "fastest that fits", "step, MFU", "because")]
    for workload, batch_size, on in CHOICES:
        search_result = choose.searched(traced(workload, batch_size), spanax.cluster(on), Request(attention="auto"))
        item = search_result.best
        assert item is not None
        mfu = search_result.model_flops / (
            search_result.peak_flops * search_result.cluster.num_devices * item.step_seconds
        )
        chosen = f"`{item.layout}` on `{item.whole_mesh}`, remat {item.remat}"
        lines.append(
            (f"`{workload}`, {batch_size}", f"`{on}`", chosen, f"{item.step_seconds:.3g} s, {100 * mfu:.0f} %",
             rule(search_result, item, plan_of(search_result, item)))
        )  # fmt: skip
    return table(*lines)


def stages() -> str:
    """GPT-3 on 512 A100s: the fastest layout by how many stages it has."""
    search_result = searched("gpt3-175b", 1536, "a100-80gb:64x8")
    lines: list[tuple[object, ...]] = [("stages", "layout", "schedule, remat", "peak memory", "step")]
    for count in (1, 4, 8, 16, 32):
        item = next(candidate for candidate in search_result.candidates if candidate.num_stages == count)
        schedule = f"{item.schedule}, " if count > 1 else ""
        lines.append(
            (count, f"`{item.layout}` on `{item.whole_mesh}`",
             f"{schedule}{item.microbatches} microbatches, {item.remat}",
             f"{item.peak_bytes / GIB:.1f} GiB", f"{item.step_seconds:.3g} s")
        )  # fmt: skip
    return table(*lines)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("choosing.md", "choices"): choices,
    ("data-parallel.md", "layouts"): lambda: layouts(
        "gpt2-xl", 64, "h100:8", [("data", "data=8"), ("zero1", "fsdp=8"), ("zero2", "fsdp=8"), ("fsdp", "fsdp=8")],
        remat=("full",),
    ),
    ("data-parallel.md", "nodes"): lambda: layouts(
        "llama3-8b", 128, "h100:8x8",
        [("fsdp", "fsdp=64"), ("hsdp", "data=2,fsdp=32"), ("hsdp", "data=8,fsdp=8")],
    ),
    ("tensor.md", "layouts"): lambda: layouts(
        "llama3-8b", 8, "h100:8",
        [("fsdp", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2"), ("tensor", "model=8"), ("tensor+seq", "model=8")],
    ),
    ("pipelines.md", "stages"): stages,
    ("expert.md", "layouts"): lambda: layouts(
        "mixtral-8x7b", 64, "h100:8x8",
        [("fsdp+expert", "fsdp=32,expert=2"), ("fsdp+expert", "fsdp=8,expert=8"), ("fsdp", "fsdp=64"),
         ("expert", "data=8,expert=8")],
    ),
}  # fmt: skip


def close(result: str, output: str) -> bool:
    """Whether two tables say the same: equal words, and numbers within the tolerance."""
    number = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
    if number.sub("#", result) != number.sub("#", output):
        return False
    pairs = zip(map(float, number.findall(result)), map(float, number.findall(output)), strict=True)
    return all(abs(here - there) <= TOLERANCE * max(here, there) + 0.011 for here, there in pairs)


QUICK = [
    ("data-parallel.md", "layouts"),
    ("data-parallel.md", "nodes"),
    ("tensor.md", "layouts"),
]
"""Those of few layouts, not of searches through all of them."""


@pytest.mark.parametrize("page, name", sampled(TABLES, QUICK), ids=["-".join(key) for key in TABLES])
def test_a_table_equals_the_answer_of_the_planner(page: str, name: str) -> None:
    path, pattern = DOCS / page, re.compile(MARK.format(name=name), re.DOTALL)
    result = TABLES[page, name]()
    if os.environ.get("SPANAX_GOLDEN") == "update":
        path.write_text(pattern.sub(lambda mark: f"{mark[1]}{result}\n{mark[3]}", path.read_text()))
    search_result = re.search(pattern, path.read_text())
    assert search_result, f"{page} has no place for '{name}'"
    assert close(f"{result}\n", search_result[2]), f"a price changed: `make golden`\n{result}"


def test_a_wrong_number_is_detected() -> None:
    assert close("| a | 1.00 GiB |", "| a | 1.02 GiB |")
    assert not close("| a | 1.00 GiB |", "| a | 1.10 GiB |") and not close("| a | 1 GiB |", "| b | 1 GiB |")


ELSEWHERE = {("pipelines.md", "costs"), ("pipelines.md", "hops")} | {
    (page, name) for page, tables in generated_pages.TABLES.items() for name in tables
}
"""Tables that other tests generate."""


def test_every_table_of_the_guides_is_generated() -> None:
    texts = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    marked = {(page, name) for page, text in texts.items() for name in re.findall(r"<!-- table: (\w+) ", text)}
    assert marked == TABLES.keys() | ELSEWHERE
