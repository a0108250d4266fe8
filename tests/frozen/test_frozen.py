"""Frozen behavior: programs, axes, plans, prices, lowered steps and texts are those of the golden files.

`make freeze` writes the files, `make frozen` compares all of them, and `make test` compares a few. With
`SPANAX_FROZEN_TEXTS=DIR` the texts themselves are written to DIR, so that two commits can be compared with `diff -r`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import zoo
from byo import corpus
from frozen.digests import Texts, digest, texts_of
from spanax.trace.program import Program

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix"),
]

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "frozen"

VERSION = ".".join(jax.__version__.split(".")[:2])
"""Of JAX, whose jaxprs differ between versions."""

VARIANTS: dict[str, Callable[[Program], Program]] = {
    "as written": lambda program: program,
    "remat full": lambda program: program.with_remat("full"),
    "loss chunks 4": lambda program: program.with_loss_chunks(4),
    "microbatches 4": lambda program: program.with_microbatches(4),
    "ring": lambda program: program.with_context("ring"),
    "pipeline": lambda program: program,
}

QUICK = {"mlp", "gpt", "flow"}
"""The models that `make test` compares."""


def texts(name: str, variant: str) -> Texts:
    corpus.program.cache_clear()
    trace = lambda: VARIANTS[variant](corpus.program(name))  # noqa: E731
    return texts_of(trace, pipeline=variant == "pipeline")


def models() -> list[Any]:
    names = [*corpus.FILES, *zoo.ZOO]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", models())
def test_behavior_is_frozen(name: str) -> None:
    found = {variant: texts(name, variant) for variant in VARIANTS}
    write_texts(name, found)
    digests = {variant: {key: digest(text) for key, text in rows.items()} for variant, rows in found.items()}
    path = GOLDEN / f"{name}.json"
    golden = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("SPANAX_GOLDEN") == "update":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(golden | {VERSION: digests}, indent=0, sort_keys=True) + "\n")
        return
    if VERSION not in golden:
        pytest.skip(f"JAX {VERSION} is not frozen, {' and '.join(golden)} are")
    assert digests == golden[VERSION]


def write_texts(name: str, found: dict[str, Texts]) -> None:
    if folder := os.environ.get("SPANAX_FROZEN_TEXTS"):
        for variant, rows in found.items():
            for key, text in rows.items():
                path = Path(folder, name, variant, key.replace("/", "_"))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
