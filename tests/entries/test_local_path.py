"""URLs in place of paths: refused wherever a user names a path, before anything is read, traced or written."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax import cli
from spanax.interop import export_weights, import_weights

COMMANDS = (
    "train --output-dir URL", "train --resume --output-dir URL", "train --data URL", "train --data a.jsonl=0.5,URL=0.5",
    "train --plan URL", "train --init URL", "train --tokenizer URL/tokenizer.json", "train --config URL",
    "train --config c.toml", "train URL/w.py:x",
    "train w.py:source --output-dir out", "train w.py:init --data python --output-dir out",
    "launch local -- train --output-dir URL",
    "launch slurm --dry-run -- train --data URL", "launch local --logs URL -- python -c 1", "checkpoint show URL",
    "checkpoint verify URL", "report URL", "report . -o URL", "inspect URL", "inspect . --svg URL",
    "doctor --output-dir URL",
    "plan gpt-nano --on cpu:8 --out URL", "plan gpt-nano --on URL.toml", "plan --diff URL URL", "plan --calibrate URL",
    "check gpt-nano --on cpu:8 --out URL", "check gpt-nano --on cpu:8 --plan URL", "compare gpt-nano --on URL.toml",
    "export URL --as gpt2 --output-dir out", "export . --as gpt2 --output-dir URL", "probe --out URL",
    "import URL --as gpt2 --output-dir out", "import . --as gpt2 --output-dir URL",
)  # fmt: skip

WORKLOADS = """
import jax, optax, spanax
parts = {"build": lambda rngs: 1 / 0, "loss": lambda model, x: 1 / 0, "batch": jax.ShapeDtypeStruct((8, 8), "float32")}
source = spanax.Workload(**parts, optimizer=optax.sgd(0.1), source="gs://bucket/x")
init = spanax.Workload(**parts, optimizer=optax.sgd(0.1), init="gs://bucket/x")
"""


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which each URL is the path of a folder with text."""
    monkeypatch.chdir(tmp_path)
    for scheme in ("gs", "s3+x", "file"):
        (tmp_path / f"{scheme}:" / "bucket" / "x").mkdir(parents=True)
        (tmp_path / f"{scheme}:" / "bucket" / "x" / "a.txt").write_text("to be or not to be" * 1000)
    Path("w.py").write_text(WORKLOADS)
    Path("c.toml").write_text('data = "gs://bucket/x"\n')
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_refuse_urls(line: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(empty)
    with pytest.raises(SystemExit) as stop:
        cli.main(line.replace("URL", "gs://bucket/x").split())
    assert stop.value.code == 2 and names(empty) == before
    first, fix = capsys.readouterr().err.splitlines()
    assert first.startswith("spanax: 'gs://bucket/x") and "is a URL" in first and fix.startswith("  fix: mount the ")


@functools.cache
def program() -> tuple[spanax.Program, spanax.Plan]:
    traced = spanax.trace(
        build=lambda rngs: nnx.Linear(4, 4, rngs=rngs), optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 4), "float32"), loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    return traced, spanax.plan(traced, spanax.cluster("cpu:8"), layout="data")


BATCH = {name: np.zeros((8, 4), "int32") for name in ("inputs", "targets")}
CALLS: dict[str, Callable[[Any], Any]] = {
    "Checkpoints": spanax.Checkpoints,
    "save": lambda url: spanax.start(*program()).save(url),
    "restore": lambda url: spanax.restore(*program(), url),
    "start": lambda url: spanax.start(*program(), init=url),
    "track": lambda url: spanax.track("", url).__enter__(),
    "batches": lambda url: spanax.batches(url, BATCH),
    "mixture": lambda url: spanax.batches(spanax.mixture([(url, 1), ("python", 1)]), BATCH),
    "tokenizer": lambda url: spanax.batches("python", BATCH, tokenizer=f"{url}/tokenizer.json"),
    "Plan.save": lambda url: program()[1].save(url),
    "Plan.load": spanax.Plan.load,
    "cluster": lambda url: spanax.cluster(f"{url}.toml"),
    "export": lambda url: export_weights(".", "gpt2", url),
    "import": lambda url: import_weights(url, "gpt2", "out"),
}


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", CALLS)
def test_calls_refuse_urls(name: str, kind: Callable[[str], Any], empty: Path) -> None:
    before = names(empty)
    with pytest.raises(spanax.SpanaxError, match=r"^'s3\+x://bucket/x.*' is a URL") as error:
        CALLS[name](kind("s3+x://bucket/x"))
    assert error.value.exit_code == 2 and names(empty) == before


@pytest.mark.parametrize("kind", [str, Path])
def test_the_path_of_a_file_url_is_advised(kind: Callable[[str], Any], empty: Path) -> None:
    with pytest.raises(spanax.SpanaxError) as error:
        spanax.Checkpoints(kind(f"file://{empty}/a%20b"))
    assert error.value.args[0].partition("fix: ")[2] == f"{empty}/a b"


def test_an_absolute_path_of_a_url_raises(empty: Path) -> None:
    for path in (os.path.abspath("s3+x://bucket/x"), Path("s3+x://bucket/x").absolute()):
        with pytest.raises(spanax.SpanaxError, match=r"^'s3\+x://bucket/x' is a URL"):
            spanax.Checkpoints(path)


@pytest.mark.parametrize("name", ["a:b", "a:/b", "C:\\x", "2026-01-01T10:00", "./ab:/x", "a/hf://x", "1s://x"])
def test_other_names_are_paths(name: str, empty: Path) -> None:
    with spanax.Checkpoints(name) as checkpoints:
        checkpoints.save(1, {"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))})
    assert os.path.isdir(Path(name, "1"))
