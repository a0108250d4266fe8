"""The pages that users read: every example is run, every command is read as the command line reads it."""

import contextlib
import doctest
import io
import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax import cli
from spanax.errors import SpanaxError
from written import Block, absent_extras_are_fine, blocks, commands, pages, read

ROOT = Path(__file__).resolve().parent.parent
DOCS, TESTS = ROOT / "docs", ROOT / "tests"
PAGES = {path.relative_to(ROOT).as_posix(): blocks(path.read_text()) for path in pages(ROOT)}
RUNNING = {"docs/comparing.md"}
"""Pages whose examples run a step."""

NEEDS_FILES = re.compile(r"\.(json|toml|py)\b|my_|--parity|--profiled|--out")


def with_blocks(kind: str) -> list[str]:
    return [page for page, found in PAGES.items() if any(block.kind == kind for block in found)]


def needs_devices() -> None:
    try:
        jax.devices()
    except RuntimeError:
        pytest.skip("JAX can start no backend here")


# ---- doctests


@pytest.mark.parametrize("page", with_blocks("doctest"))
def test_the_examples_of_a_page_run(page: str) -> None:
    if page in RUNNING:
        needs_devices()
    found = doctest.testfile(str(ROOT / page), module_relative=False, encoding="utf-8")
    assert found.attempted > 0 and found.failed == 0


def test_a_wrong_example_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("    >>> 1 + 1\n    3\n")
    found = doctest.testfile(str(tmp_path / "page.md"), module_relative=False, report=False, verbose=False)
    assert found.failed == 1


# ---- Python that is no doctest: run with what a reader has at hand


class MyModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, 32, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 32, rngs=rngs)
        self.hidden, self.head = nnx.Linear(32, 48, rngs=rngs), nnx.Linear(48, 64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(x)
        x = x + self.down(jax.nn.gelu(self.up(x)))
        return self.head(jax.nn.gelu(self.hidden(x)))


def my_loss(model: MyModel, batch: dict[str, jax.Array]) -> jax.Array:
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(model(batch["inputs"]), batch["targets"]).mean()


def at_hand() -> dict[str, Any]:
    """What an example of a page takes for granted: the imports, and a reader's model, data and machine."""
    ids = jax.ShapeDtypeStruct((8, 16), "int32")
    batch = {"inputs": ids, "targets": ids}
    program = spanax.trace(build=MyModel, optimizer=optax.adamw(3e-4), batch=batch, loss=my_loss)
    source = [{"inputs": np.full(16, i % 64, "int32"), "targets": np.full(16, i % 64, "int32")} for i in range(16)]
    return {
        "jax": jax, "jnp": jnp, "np": np, "optax": optax, "nnx": nnx, "spanax": spanax,
        "cross_entropy": optax.softmax_cross_entropy_with_integer_labels, "MyModel": MyModel, "my_loss": my_loss,
        "batch": batch, "example_batch": batch, "source": source, "my_images": source, "program": program,
        "cluster": spanax.cluster("cpu:8"),
    }  # fmt: skip


class Few:
    """Batches that end after two: pages train for as long as there is data, and there is no end of it."""

    def __init__(self, batches: Any):
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batches, 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def run_blocks(page: str, found: list[Block]) -> None:
    """Run the Python of a page from top to bottom."""
    names, text = at_hand(), "".join(block.text for block in found)
    if re.search(r"\brun\.", text) and not re.search(r"^run\b.* = ", text, re.MULTILINE):
        plan = spanax.plan(names["program"], spanax.local(), layout="data")
        names |= {"plan": plan, "run": spanax.start(names["program"], plan)}
        names |= {"batches": spanax.batches(names["source"], plan)}
    for block in found:
        # The lines before keep the numbers those of the page.
        code = compile("\n" * (block.line - 1) + block.text, page, "exec")
        exec(code, names)


@pytest.mark.parametrize("page", with_blocks("python"))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_devices()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "tests" / "interop" / "weights" / "gpt2", tmp_path / "path" / "to" / "gpt2")
    endless = spanax.batches
    monkeypatch.setattr(
        sys.modules[endless.__module__], "batches", lambda *given, **named: Few(endless(*given, **named))
    )
    with contextlib.redirect_stdout(io.StringIO()), absent_extras_are_fine():
        run_blocks(page, [block for block in PAGES[page] if block.kind == "python"])


def test_wrong_python_is_found() -> None:
    for text in ("    plan = spanax.plans(program)\n", "    run = spanax.start(\n"):
        found = blocks(text)
        assert [block.kind for block in found] == ["python"]
        with pytest.raises((AttributeError, SyntaxError)):
            run_blocks("page.md", found)


# ---- commands


@pytest.mark.parametrize("page", with_blocks("commands"))
def test_the_commands_of_a_page_can_be_asked(page: str) -> None:
    for block in PAGES[page]:
        for line in commands(block.text) if block.kind == "commands" else ():
            read(line)


@pytest.mark.parametrize(
    "line",
    [
        "spanax axess gpt2", "spanax train gpt3", "spanax plan gpt2 --on h10:8", "spanax train --layout fdsp",
        "spanax train gpt2 --mesh dta=8", "spanax plan gpt2 --onn cpu:8", "spanax launch slurm -- plan gpt2",
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((SpanaxError, SystemExit)):
        for one in commands(blocks(f"    {line}    # a word\n")[0].text):
            read(one)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_within_the_text_exist(page: str) -> None:
    named = re.findall(r"`spanax ([a-z][a-z-]*)", (ROOT / page).read_text())
    assert set(named) <= {*cli.COMMANDS, "launch"}


def planned_without_files() -> list[str]:
    """The commands of all pages that look at axes or plan, and need nothing that is not there."""
    lines = [line for found in PAGES.values() for block in found for line in commands(block.text)]
    return sorted({line for line in lines if re.match("spanax (axes|plan) ", line) and not NEEDS_FILES.search(line)})


@pytest.mark.slow
@pytest.mark.parametrize("line", planned_without_files())
def test_a_command_that_plans_runs(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(shlex.split(line, comments=True)[1:])
    assert capsys.readouterr().out


# ---- what a page refers to


def unknown_tests(text: str) -> list[str]:
    """What a page calls a test, and is none."""
    named = re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?", text)
    files = {path: path.read_text() for path in TESTS.rglob("test_*.py")}

    def is_known(file: str, test: str) -> bool:
        return any(path.match(file) and (not test or f"def {test}(" in said) for path, said in files.items())

    return [f"{file}::{test}" for file, test in named if not is_known(file, test)]


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md") if "test_" in page.read_text()))
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    assert not unknown_tests((DOCS / page).read_text())


def test_a_test_that_does_not_exist_is_found() -> None:
    text = "`tests/test_docs.py::test_a_wrong_example_is_found`, `test_docs.py::no`, `tests/run/test_docs.py`"
    assert unknown_tests(text) == ["test_docs.py::no", "run/test_docs.py::"]


def dead_links(page: Path) -> list[str]:
    """Files that a page links to, and that are not there."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    return [target for target in targets if "://" not in target and not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    assert not dead_links(ROOT / page)


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("[here](page.md#part), [there](nowhere.md)")
    assert dead_links(tmp_path / "page.md") == ["nowhere.md"]
