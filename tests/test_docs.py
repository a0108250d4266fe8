"""The pages that users read: every example is run, every command is read as the command line reads it."""

import contextlib
import doctest
import io
import itertools
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sampling import sampled
from spanax import cli
from spanax.errors import SpanaxError
from written import Block, blocks, commands, looks_like_python, pages, read

ROOT = Path(__file__).resolve().parent.parent
DOCS, TESTS = ROOT / "docs", ROOT / "tests"
PAGES = {path.relative_to(ROOT).as_posix(): blocks(path.read_text()) for path in pages(ROOT)}


def with_blocks(kind: str) -> list[str]:
    return [page for page, result in PAGES.items() if any(block.kind == kind for block in result)]


# ---- doctests


def check_examples(page: str) -> None:
    result = doctest.testfile(str(ROOT / page), module_relative=False, encoding="utf-8")
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("page", with_blocks("doctest"))
def test_the_examples_of_a_page_run(page: str) -> None:
    check_examples(page)


def test_a_wrong_example_is_detected(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("    >>> 1 + 1\n    3\n")
    result = doctest.testfile(str(tmp_path / "page.md"), module_relative=False, report=False, verbose=False)
    assert result.failed == 1


# ---- Python blocks


FIRST_PAGES = ["README.md", "docs/quickstart.md"]
EXTRAS = {"docs/monitoring.md": "tensorboardX"}
"""The optional package that a page's examples import."""


def python(page: str) -> list[Block]:
    return [block for block in PAGES[page] if block.kind == "python"]


def run_blocks(page: str, blocks: list[Block]) -> None:
    """Executes the Python of a page from top to bottom, exactly as printed, in one namespace that starts empty."""
    names = {"__name__": "__main__"}
    try:
        for block in blocks:
            # The lines before keep the numbers those of the page.
            code = compile("\n" * (block.line - 1) + block.text, page, "exec")
            exec(code, names)
    finally:
        names.clear()  # functions refer to it: without this, batches and their thread outlive the page


PAGES_OF_PYTHON = [page for page in with_blocks("python") if page not in FIRST_PAGES]
LONG = (
    "docs/checkpoints.md", "docs/choosing.md", "docs/data.md", "docs/generate.md", "docs/losses.md",
    "docs/monitoring.md", "docs/training.md", "docs/fine-tune.md",
)  # fmt: skip
TODAY = LONG[datetime.now(UTC).toordinal() % len(LONG)]
"""The page of the longer ones whose turn it is in `make test`; `make slow` runs the others."""
QUICK = [page for page in PAGES_OF_PYTHON if page not in LONG or page == TODAY]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("page", sampled(PAGES_OF_PYTHON, QUICK))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in EXTRAS:
        pytest.importorskip(EXTRAS[page])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with contextlib.redirect_stdout(io.StringIO()):
        run_blocks(page, python(page))


def differences(shown: str, printed: str) -> list[str]:
    """Lines of a page that the program did not print, in their order; decimals may differ by 10 %.

    Losses depend on the versions of Python, whose standard library is the data, and of JAX.
    """
    rest, missing = iter(printed.splitlines()), []
    for line in shown.splitlines():
        if not any(_is_line(line, other) for other in rest):
            missing.append(line)
            rest = iter(printed.splitlines())
    return missing


def _is_line(shown: str, printed: str) -> bool:
    decimal = r"\d+\.\d+"
    numbers = [[float(text) for text in re.findall(decimal, line)] for line in (shown, printed)]
    words = [re.sub(decimal, "#", line).split() for line in (shown, printed)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.1)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("page", sampled(FIRST_PAGES, ["README.md"]))
def test_a_first_page_runs_as_a_script_and_prints_what_it_shows(page: str, tmp_path: Path) -> None:
    """In a process of its own, without the settings that these tests give JAX."""
    (tmp_path / "page.py").write_text("\n".join(block.text for block in python(page)))
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outputs = [after.text for block, after in itertools.pairwise(PAGES[page]) if (block.kind, after.info) == OUTPUT]
    assert outputs and not differences("".join(outputs), done.stdout), done.stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) > 2 and losses[-1] < losses[0]


OUTPUT = ("python", "text")
"""A block of Python and, next, a block of what it prints."""


def test_a_line_that_is_not_printed_is_detected() -> None:
    printed = "a plan\nstep 20: loss 2.849\nstep 40: loss 2.693\n"
    assert not differences("a plan\nstep 40: loss 2.70\n", printed)
    assert differences("step 20: loss 2.5\nstep 21: loss 2.849\n", printed) == [
        "step 20: loss 2.5", "step 21: loss 2.849",
    ]  # fmt: skip
    assert differences("step 40: loss 2.693\na plan\n", printed) == ["a plan"]


@pytest.mark.parametrize(
    "text", ["import spanax\nspanax.plans(1)\n", "import spanax\nspanax.start(\n", "spanax.local()\n"]
)
def test_wrong_python_is_detected(text: str) -> None:
    result = blocks(f"```python\n{text}```\n")
    assert [block.kind for block in result] == ["python"]
    with pytest.raises((AttributeError, NameError, SyntaxError)):
        run_blocks("page.md", result)


def unmarked(text: str) -> list[int]:
    """The lines at which Python begins that is not fenced as such, and so would not run."""
    return [block.line for block in blocks(text) if block.kind == "python" and block.info != "python"] + [
        block.line for block in blocks(text) if block.info in ("text", "console") and looks_like_python(block.text)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_python_is_fenced_as_python(page: str) -> None:
    assert not unmarked((ROOT / page).read_text())


def test_unmarked_python_is_detected() -> None:
    assert unmarked("Words:\n\n    plan = spanax.plan(\n\n```text\nimport jax\n```\n```python\nx = 1\n```\n") == [3, 5]


# ---- commands


@pytest.mark.parametrize("page", with_blocks("commands"))
def test_the_commands_of_a_page_parse(page: str) -> None:
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
def test_a_wrong_command_is_detected(line: str) -> None:
    with pytest.raises((SpanaxError, SystemExit)):
        for command in commands(blocks(f"    {line}    # a word\n")[0].text):
            read(command)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_within_the_text_exist(page: str) -> None:
    named = re.findall(r"`spanax ([a-z][a-z-]*)", (ROOT / page).read_text())
    assert set(named) <= cli.COMMANDS.keys()


# ---- what a page refers to


def unknown_tests(text: str) -> list[str]:
    """What a page calls a test, and is none."""
    named = re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?", text)
    files = {path: path.read_text() for path in TESTS.rglob("test_*.py")}

    def is_known(file: str, test: str) -> bool:
        return any(path.match(file) and (not test or f"def {test}(" in output) for path, output in files.items())

    alone = [test for test in re.findall(r"`(test_\w+)`", text) if not is_known("*.py", test)]
    return [f"{file}::{test}" for file, test in named if not is_known(file, test)] + alone


NAMING_TESTS = [page for page in (*sorted(DOCS.glob("*.md")), ROOT / "SECURITY.md") if "test_" in page.read_text()]


@pytest.mark.parametrize("page", NAMING_TESTS, ids=lambda page: page.name)
def test_the_tests_named_by_a_page_exist(page: Path) -> None:
    assert not unknown_tests(page.read_text())


def test_a_missing_test_is_detected() -> None:
    text = "`tests/test_docs.py::test_a_wrong_example_is_detected`, `test_docs.py::no`, `tests/run/test_docs.py`"
    text += ", `test_a_wrong_example_is_detected`, `test_of_nothing`"
    assert unknown_tests(text) == ["test_docs.py::no", "run/test_docs.py::", "test_of_nothing"]


def dead_links(page: Path) -> list[str]:
    """Files that a page links to, and that are not there."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    return [target for target in targets if "://" not in target and not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    assert not dead_links(ROOT / page)


def test_a_dead_link_is_detected(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("[here](page.md#part), [there](nowhere.md)")
    assert dead_links(tmp_path / "page.md") == ["nowhere.md"]
