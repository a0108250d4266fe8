"""The collectives of every family of models in every layout, frozen: what a step moves changes with a reason, or not.

Two programs may move the same bytes and one of them in a hundred small pieces: counts are frozen beside bytes. The
steps are those of test_parity.py, whose compiled programs are kept. `make golden` writes the file anew. Pipelines are
not among them.
"""

import difflib
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import pytest

import spanax
from byo import corpus
from masks import ATTENTIONS
from programs import calm_program
from spanax.check.hlo.collectives import collectives
from spanax.plan.place import as_planned
from spanax.train.run import Run
from step.attention.test_kernels import masked_program
from step.test_expert_forms import FORMS
from step.test_expert_forms import program as form

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "collectives.json"

VERSION = ".".join(jax.__version__.split(".")[:2])
"""Of the compiler, as far as its programs may differ; the file holds those of the oldest and the newest."""

COMMON = [
    ("data", "data=8"),
    ("zero1", "fsdp=8"),
    ("zero2", "fsdp=8"),
    ("fsdp", "fsdp=8"),
    ("hsdp", "data=2,fsdp=4"),
    ("tensor", "model=8"),
    ("data+tensor", "data=4,model=2"),
    ("fsdp+tensor", "fsdp=4,model=2"),
]
SEQUENCE = [
    ("tensor+seq", "model=8"),
    ("fsdp+tensor+seq", "fsdp=2,model=4"),
    ("context", "data=4,context=2"),
    ("ring", "data=2,context=4"),
]
EXPERT = [("expert", "expert=8"), ("expert", "data=4,expert=2")]
MASKED = [SEQUENCE[-1], ("ulysses", "data=4,context=2"), COMMON[-2]]

MATRIX = {
    "gpt": COMMON + SEQUENCE,
    "llama": COMMON[-3:] + SEQUENCE,
    "vit-scan": COMMON,
    "moe": COMMON + EXPERT,
    "mixtral": COMMON[-1:] + EXPERT[1:],
    "resnet": [COMMON[0], *COMMON[3:]],
    "ddpm": [COMMON[0], COMMON[3], COMMON[-1]],
    "gqa": SEQUENCE[-1:],
    "dropless": EXPERT[1:],
    "indexed-moe": EXPERT[:1],
    "gather": EXPERT[1:],
    "sorted_moe": EXPERT[1:],
    "sorted_taken": EXPERT,
    "stored": MASKED,
    "causal documents": MASKED,
    "prefix": MASKED,
    "window": MASKED,
    "chunks": MASKED,
    "slopes": MASKED,
    "distances": MASKED,
    "soft cap": MASKED,
    "sink of a window": MASKED,
}

QUICK = {
    "gpt": {"fsdp+tensor+seq"},
    "causal documents": {"ring"},
}
"""Programs that test_parity.py compiles as well, and a small one."""


def program_of(name: str) -> spanax.Program:
    """Of the zoo, of other authors, or the form of experts or of attention of this name."""
    if name in FORMS:
        return form(name)
    if name in ATTENTIONS:
        return masked_program(name, (8, 64))
    return corpus.program(name) if name in corpus.FILES else calm_program(name)


def cases() -> list[Any]:
    result = []
    for name, layouts in MATRIX.items():
        quick = set(QUICK.get(name, ()))
        for layout, mesh in layouts:
            marks = () if layout in quick else pytest.mark.slow
            quick.discard(layout)
            result.append(pytest.param(name, layout, mesh, marks=marks, id=f"{name} {layout} {mesh}"))
    return result


def moved(name: str, layout: str, mesh: str) -> list[str]:
    """A line for each mesh axis and kind: how many run in a step, and the bytes of their results on one device."""
    program = program_of(name)
    plan = spanax.plan(program, spanax.cluster("cpu:8"), layout=layout, mesh=mesh)
    run = Run(as_planned(program, plan), plan, plan.mesh.build(), state=[])
    (module,) = run.compile().runtime_executable().hlo_modules()
    result: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for collective in collectives(module.as_serialized_hlo_module_proto(), plan.mesh):
        assert collective.is_counted, collective
        sums = result[collective.axes, collective.kind]
        sums[0], sums[1] = sums[0] + collective.runs, sums[1] + collective.num_bytes
    return [f"{kind} over {axes}: {runs} of {size:,} bytes" for (axes, kind), (runs, size) in sorted(result.items())]


def written(golden: dict[str, dict[str, list[str]]]) -> str:
    return json.dumps(golden, indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize(("name", "layout", "mesh"), cases())
def test_collectives_equal_the_golden_file(name: str, layout: str, mesh: str) -> None:
    case, result = f"{name} {layout} {mesh}", moved(name, layout, mesh)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("SPANAX_GOLDEN") == "update":
        golden.setdefault(case, {})[VERSION] = result
        GOLDEN.write_text(written(golden))
    if VERSION not in golden[case]:
        pytest.skip(f"programs of jax {VERSION} are not frozen, those of {' and '.join(golden[case])} are")
    if result != golden[case][VERSION]:
        changed = difflib.unified_diff(golden[case][VERSION], result, "golden", "now", lineterm="", n=9)
        pytest.fail("\n".join([f"{case}, jax {VERSION}: `make golden` if this is right", *changed]), pytrace=False)


def test_every_layout_of_every_family_is_frozen() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert set(golden) == {case.id for case in cases()}
    assert all(len(versions) == 2 for versions in golden.values())
