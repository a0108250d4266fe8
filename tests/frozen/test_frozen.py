"""Frozen behavior: programs, axes, plans of presets, lowered steps and texts are those of the golden files.

`make freeze` writes the files, `make frozen` compares all of them, and `make test` compares a few.
"""

from collections.abc import Callable
from typing import Any

import pytest

import zoo
from byo import corpus
from frozen.digests import Texts, texts_of
from frozen.golden import compare
from sampling import sampled
from spanax.trace.program import Program

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix"),
]

VARIANTS: dict[str, Callable[[Program], Program]] = {
    "as written": lambda program: program,
    "remat full": lambda program: program.variant(remat="full"),
    "loss chunks 4": lambda program: program.variant(loss_chunks=4),
    "microbatches 4": lambda program: program.variant(microbatches=4),
    "ring": lambda program: program.variant(context="ring"),
    "pipeline": lambda program: program,
}

WITH_PROSE = {"mlp", "gpt", "flow"}
"""The models whose texts include prose. `make test` compares the first, `make frozen` every model."""


def texts(name: str, variant: str) -> Texts:
    corpus.program.cache_clear()
    trace = lambda: VARIANTS[variant](corpus.program(name))  # noqa: E731
    rows = texts_of(trace, pipeline=variant == "pipeline")
    return {key: text for key, text in rows.items() if name in WITH_PROSE or not key.startswith("words")}


def models() -> list[Any]:
    return sampled([*corpus.FILES, *zoo.ZOO], ["mlp"])


@pytest.mark.parametrize("name", models())
def test_behavior_is_frozen(name: str) -> None:
    compare(name, {variant: texts(name, variant) for variant in VARIANTS})
