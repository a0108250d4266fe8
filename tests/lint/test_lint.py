"""Lint: seeded mistakes are found by their code, and layouts without one are left alone."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from spanax.check.finding import Finding, Severity
from spanax.check.lint import PROFILE_RULES, RULES, lint, rules_page, waived
from spanax.check.report import Figures, Report
from spanax.errors import SpanaxError
from spanax.models.workloads import load
from spanax.plan.layout import Layout
from spanax.plan.plan import Plan, Schedule
from spanax.trace.program import Program

Checked = tuple[Program, Plan, spanax.Cluster, Report | None]


class Wide(nnx.Module):
    """Three matmuls, the last of them square and `odd` wide."""

    def __init__(self, rngs: nnx.Rngs, width: int, odd: int):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, odd, rngs=rngs)
        self.head = nnx.Linear(odd, odd, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return self.head(self.down(nnx.relu(self.up(x_BD))))


class Tall(nnx.Module):
    """Layers written out one after the other."""

    def __init__(self, rngs: nnx.Rngs, layers: int):
        self.layers = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(layers)])

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        for layer in self.layers:
            x_BD = nnx.relu(layer(x_BD))
        return x_BD


def traced(build: Callable[[nnx.Rngs], nnx.Module], width: int, batch: int, dtype: Any = jnp.bfloat16) -> Program:
    return spanax.trace(
        build=build, optimizer=optax.adamw(1e-3), batch=jax.ShapeDtypeStruct((batch, width), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(), compute_dtype=dtype,
    )  # fmt: skip


@functools.cache
def wide(width: int = 1024, odd: int = 1024, batch: int = 4096, dtype: Any = jnp.bfloat16) -> Program:
    return traced(functools.partial(Wide, width=width, odd=odd), width, batch, dtype)


@functools.cache
def tall(layers: int) -> Program:
    return traced(functools.partial(Tall, layers=layers), 256, 4096)


@functools.cache
def text(name: str, batch: int) -> Program:
    return load(name, batch_size=batch).trace(learning_rate=1e-3, num_steps=10, compute_dtype=jnp.bfloat16)


def planned(program: Program, cluster: str, **options: Any) -> Checked:
    machine = spanax.cluster(cluster)
    return program, spanax.plan(program, machine, **options), machine, None


def best(name: str, cluster: str) -> Checked:
    return planned(text(name, 64), cluster)


def tight(found: Checked, share: float) -> Checked:
    """The same on devices that have so much of what the plan needs."""
    program, plan, machine, report = found
    from spanax.plan.own import candidate_of

    needed = candidate_of(program, plan, machine).peak_bytes
    return program, plan, dataclasses.replace(machine, memory_bytes=int(needed / share)), report


def compiled(found: Checked, **figures: Any) -> Checked:
    """With a compiler's report of these figures."""
    program, plan, machine, _ = found
    told = Figures(flops=1e9, collectives={"fsdp": {"all-gather": 1 << 22}})
    said = dataclasses.replace(told, **figures)
    report = Report(3, str(machine), plan.layout.name, str(plan.mesh), True, "", told, said)
    return program, plan, machine, report


def own_layout(computed: tuple[str, ...] = ("batch",), **stored: tuple[str, ...]) -> Layout:
    kept = {"params": ("x",), "gradients": ("x",), "optimizer": ("x",)} | stored
    return Layout("mine", computed=(("x", computed),), **{f"stored_{kind}": axes for kind, axes in kept.items()})


MISTAKES: dict[str, tuple[str, Callable[[], Checked]]] = {
    "a head that 8 does not divide": ("SPX001", lambda: planned(wide(1024, 1021), "a100:8", layout="fsdp")),
    "parameters split, gradients and optimizer not": (
        "SPX004", lambda: planned(wide(), "a100:8", mesh="x=8", layout=own_layout(optimizer=(), gradients=()))
    ),
    "an axis that nothing uses": (
        "SPX002", lambda: planned(wide(), "a100:8", mesh="x=4,y=2", layout=own_layout())
    ),
    "batch and weights on one axis": (
        "SPX020", lambda: planned(wide(), "a100:8", mesh="x=8", layout=own_layout(("batch", "hidden")))
    ),
    "batch and outputs on one axis": (
        "SPX020",
        lambda: planned(wide(), "a100:8", mesh="x=8", layout=own_layout(("batch", "features"))),
    ),
    "two microbatches on four stages": (
        "SPX007",
        lambda: planned(text("gpt-nano", 16), "a100:4", layout="data", mesh="data=1",
                        schedule=Schedule(num_stages=4, microbatches=2)),
    ),
    "as many microbatches as stages": (
        "SPX007",
        lambda: planned(text("gpt-nano", 16), "a100:8", layout="data", mesh="data=2",
                        schedule=Schedule(num_stages=4, microbatches=4)),
    ),
    "fsdp across nodes, a small batch": ("SPX008", lambda: planned(wide(4096, 4096, 64), "a100:8x8", layout="fsdp")),
    "tensor across nodes": ("SPX008", lambda: planned(wide(1024, 1024, 65536), "a100:64x1", layout="tensor")),
    "fsdp of what fits": ("SPX009", lambda: planned(wide(512, 512, 4096), "a100:8", layout="fsdp")),
    "tensor of what fits": ("SPX009", lambda: planned(wide(512, 512, 65536), "a100:8", layout="tensor")),
    "fsdp over four nodes, in eight parts": (
        "SPX010",
        lambda: planned(wide(4096, 4096, 8192), "a100:4x8", mesh="fsdp=32", schedule=Schedule(microbatches=8)),
    ),
    "stages of what fits": (
        "SPX011",
        lambda: planned(text("gpt-nano", 64), "a100:8", layout="data", mesh="data=4",
                        schedule=Schedule(num_stages=2, microbatches=8)),
    ),
    "16 layers written out": ("SPX013", lambda: planned(tall(16), "a100:8", layout="data")),
    "no room left": ("SPX014", lambda: tight(planned(wide(), "a100:8", layout="data"), 0.97)),
    "twice what there is": ("SPX014", lambda: tight(planned(wide(), "a100:8", layout="data"), 2.0)),
    "float32 on matrix units": ("SPX017", lambda: planned(wide(dtype=None), "h100:8", layout="data")),
    "arithmetic done twice": ("SPX003", lambda: compiled(planned(wide(), "a100:8", layout="data"), flops=2e9)),
}  # fmt: skip

CLEAN: dict[str, Callable[[], Checked]] = {
    **{
        f"the best for {name} on {cluster}": functools.partial(best, name, cluster)
        for name, cluster in (
            ("gpt-nano", "a100:8"),
            ("gpt-nano", "v5e:2x4"),
            ("moe-nano", "h100:8"),
            ("gpt2", "h100:8"),
            ("gpt2", "a100:2x8"),
        )
    },
    "a matrix that fits": lambda: planned(wide(), "a100:8", layout="data"),
    "7 layers written out": lambda: planned(tall(7), "a100:8", layout="data"),
    "float32 on a CPU": lambda: planned(wide(dtype=None), "cpu:8", layout="data"),
    "half of the memory": lambda: tight(planned(wide(), "a100:8", layout="data"), 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    code, make = MISTAKES[name]
    found = lint(*make())
    assert code in [one.code for one in found], found
    for one in found:
        assert one.message.endswith(".") and "\n" not in one.message and len(str(one).splitlines()) <= 4


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_said_of_what_is_right(name: str) -> None:
    assert lint(*CLEAN[name]()) == []


def test_every_rule_is_seeded_and_explained() -> None:
    rules = (*RULES, *PROFILE_RULES)
    assert len({rule.code for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.find.__doc__ and rule.why.endswith(".")


def test_a_comment_allows_one() -> None:
    found = [
        Finding("SPX001", Severity.WARNING, "embed", "it lies whole."),
        Finding("SPX013", Severity.INFO, "", "no."),
    ]
    assert [one.code for one in waived(found, "x = 1  # spanax: allow SPX001 embed\n")] == ["SPX013"]
    assert waived(found, "# spanax: allow SPX001\n# spanax: allow SPX013") == []
    assert waived(found, "# spanax: allow SPX001 head") == found
    with pytest.raises(SpanaxError, match="a comment allows SPX901, and there is no such rule"):
        waived(found, "# spanax: allow SPX901")


def test_a_plan_allows_the_same() -> None:
    found = [
        Finding("SPX001", Severity.WARNING, "embed", "it lies whole."),
        Finding("SPX013", Severity.INFO, "", "no."),
    ]
    assert [one.code for one in waived(found, "", ["SPX001 embed"])] == ["SPX013"]
    assert waived(found, "# spanax: allow SPX013", ["SPX001"]) == []
    assert waived(found, "", ["SPX001 head"]) == found
    for unknown in ("SPX901", "SPX901 embed", "embed", ""):
        with pytest.raises(SpanaxError, match="the plan allows .*, and there is no such rule"):
            waived(found, "", [unknown])


def test_the_page_is_that_of_the_rules() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "lint.md"
    if os.environ.get("SPANAX_GOLDEN") == "update":
        page.write_text(rules_page())
    assert page.read_text() == rules_page()
