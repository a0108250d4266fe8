"""Digests of the program, axes, plans and lowered step of one variant of a model, without running it.

A refactoring and a change of the cost model must leave all of them equal. Each digest is the first twelve hex digits of
a SHA-256. Keys that begin with `words` cover prose (reasons, tables, errors); all others cover structure and numbers,
and a change of wording leaves those equal.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

import spanax
from spanax.errors import IdleAxisError, IndivisibleError, NoLayoutError, ResizeError, SizeError, SpanaxError
from spanax.plan.place import as_planned
from spanax.plan.plan import Schedule
from spanax.trace.program import Program
from spanax.train.run import Run

ROOT = Path(__file__).resolve().parents[2]

PRESETS = {"fsdp": "fsdp=4", "data+tensor": "data=2,model=2", "fsdp+tensor+seq": "fsdp=2,model=2"}
LOWERED = "fsdp+tensor+seq"
PIPELINE = {"pipeline+tensor": "pipe=2,model=2"}
PROSE = frozenset({"reason", "why"})
"""Keys of a plan that hold sentences."""

RECORDED = (IdleAxisError, IndivisibleError, NoLayoutError, ResizeError, SizeError, SpanaxError)
"""The types of errors that digests tell apart."""

Texts = dict[str, str]
"""What is digested, by key."""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def without_names(jaxpr: Any) -> str:
    """A printed jaxpr without the names of Python functions and addresses, which no result depends on."""
    text = re.sub(r"<function [^>]*>|<bound method [^>]*>", "<function>", str(jaxpr))
    return re.sub(r"\bname=\S+| at 0x[0-9a-f]+", "", text)


def numbered(stablehlo: str) -> str:
    """StableHLO with functions and meshes numbered in order of appearance."""
    seen: dict[str, str] = {}
    return re.sub(r'@(?:"[^"]*"|[\w.$-]+)', lambda match: seen.setdefault(match[0], f"@{len(seen)}"), stablehlo)


@contextmanager
def recorded_jaxprs() -> Iterator[list[Any]]:
    """Collects every jaxpr that `jax.make_jaxpr` returns."""
    original, jaxprs = jax.make_jaxpr, []

    def make_jaxpr(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        trace = original(function, *args, **options)

        def traced(*arguments: Any, **keywords: Any) -> Any:
            result = trace(*arguments, **keywords)
            jaxprs.append(result[0] if isinstance(result, tuple) else result)
            return result

        return traced

    jax.make_jaxpr = make_jaxpr
    try:
        yield jaxprs
    finally:
        jax.make_jaxpr = original


def texts_of(trace: Callable[[], Program], *, pipeline: bool) -> Texts:
    """Everything derived from the program that `trace` returns, or the error that it raises."""
    texts: Texts = {}
    with recorded_jaxprs() as jaxprs:
        program = attempted(texts, "trace", trace)
    if program is None:
        return texts
    state_size = len(program.leaves)
    steps = [each for each in jaxprs if len(each.in_avals) == state_size + len(program.batch)]
    if steps:  # none where the variant is the program itself
        texts["jaxpr"] = without_names(steps[0])
    texts["axes"] = axes_text(program)
    for preset, mesh in (PIPELINE if pipeline else PRESETS).items():
        add_preset(texts, program, preset, mesh, pipeline=pipeline)
    return texts


def attempted(texts: Texts, key: str, function: Callable[[], Any]) -> Any:
    """The result; None, with the error recorded, where Spanax raises."""
    try:
        return function()
    except SpanaxError as error:
        # Without the code; and a type that these digests do not tell apart is recorded as its base.
        kind = next(each.__name__ for each in type(error).__mro__ if each in RECORDED)
        texts[key], texts[f"words {key}"] = f"raises {kind}", error.args[0].replace(str(ROOT), "ROOT")
        return None


def axes_text(program: Program) -> str:
    axes = program.step.axes
    rows = [(axis.name, axis.sizes, axis.ways) for axis in program.axes]
    leaves = [
        (leaf.path, leaf.shape, str(leaf.dtype), leaf.kind, leaf.axes) for leaf in (*program.leaves, *program.batch)
    ]
    return repr((rows, leaves, relabeled(axes.classes), sorted(axes.names.values())))


def relabeled(classes: Any) -> list[tuple[int | None, ...]]:
    """The classes of every value, numbered in order of appearance."""
    seen: dict[int, int] = {}
    number = lambda label: None if label is None else seen.setdefault(label, len(seen))  # noqa: E731
    return [tuple(number(label) for label in labels) for labels in classes]


def add_preset(texts: Texts, program: Program, preset: str, mesh: str, *, pipeline: bool) -> None:
    """The plan of a preset, and for one preset the lowered step."""
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    schedule = {"schedule": Schedule(pipeline="1f1b", microbatches=4)} if pipeline else {}
    key = f"plan {preset}"
    plan = attempted(texts, key, lambda: spanax.plan(program, cluster, layout=preset, mesh=mesh, **schedule))
    if plan is None:
        return
    add_plan(texts, key, plan)
    if pipeline or preset == LOWERED:
        key = f"lowered {preset}"
        step = attempted(texts, key, lambda: Run(as_planned(program, plan), plan, plan.mesh.build(), []).lower())
        if step is not None:
            texts[key] = numbered(step.as_text())


def add_plan(texts: Texts, key: str, plan: spanax.Plan) -> None:
    sentences: list[str] = []

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            sentences.extend(str(entry) for name, entry in value.items() if name in PROSE and entry)
            return {name: strip(entry) for name, entry in value.items() if name not in PROSE}
        return [strip(entry) for entry in value] if isinstance(value, list) else value

    texts[key] = json.dumps(strip(json.loads(plan.to_json())), sort_keys=True)
    texts[f"words {key}"] = "\n".join([*sentences, str(plan)])
