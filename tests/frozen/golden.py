"""Golden digests: one file per name, with the digests of every JAX version that was frozen."""

import json
import os
from pathlib import Path

import jax
import pytest

from frozen.digests import ROOT, Texts, digest

FOLDER = ROOT / "tests" / "golden" / "frozen"

VERSION = ".".join(jax.__version__.split(".")[:2])
"""Of JAX, whose jaxprs and lowered programs differ between versions."""


def compare(name: str, texts: dict[str, Texts]) -> None:
    """Asserts that the digests of texts, by variant and key, equal the golden ones, or writes these.

    With `SPANAX_FROZEN_TEXTS=DIR` the texts themselves are written to DIR, so that two commits can be compared with
    `diff -r`.
    """
    if folder := os.environ.get("SPANAX_FROZEN_TEXTS"):
        write(Path(folder, name), texts)
    digests = {variant: {key: digest(text) for key, text in rows.items()} for variant, rows in texts.items()}
    path = FOLDER / f"{name}.json"
    golden = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("SPANAX_GOLDEN") == "update":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(golden | {VERSION: digests}, indent=0, sort_keys=True) + "\n")
        return
    if VERSION not in golden:
        pytest.skip(f"JAX {VERSION} is not frozen, {' and '.join(golden) or 'no version'} is")
    assert digests == golden[VERSION]


def write(folder: Path, texts: dict[str, Texts]) -> None:
    for variant, rows in texts.items():
        for key, text in rows.items():
            path = folder / variant / key.replace("/", "_")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
