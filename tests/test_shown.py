"""Commands whose output a page shows print it: lines in order, numbers by pattern (`make golden` updates them).

A block fenced as `console` holds commands after `$ ` and their output; `...` stands for any lines. Python that begins
with `# NAME.py` is the file of that name, or a part of it. The commands of a page run in order, in one folder with
these files.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from sampling import sampled
from written import blocks, pages

ROOT = Path(__file__).resolve().parent.parent
ELLIPSIS = "..."
SECONDS = 300

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]?\d+)?")


class Shown(NamedTuple):
    """A command of a page, and the lines that follow it there."""

    command: str
    lines: list[str]


def shown(text: str) -> list[Shown]:
    """The commands of a block, each with the output that is shown."""
    _, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    split = [re.split(r"(?<!\\)\n", part.rstrip("\n"), maxsplit=1) for part in parts]
    return [Shown(command, [line for text in output for line in text.split("\n")]) for command, *output in split]


def pattern(line: str) -> str:
    """A line without its numbers and the widths of its columns."""
    return " ".join(NUMBER.sub("#", line).split())


def compared(lines: list[str], printed: list[str]) -> list[str]:
    """The shown lines with the numbers that were printed.

    Raises:
      AssertionError: a shown line was not printed, or not after the line before it.
    """
    result, rest, skips = [], printed, False
    for line in lines:
        if line == ELLIPSIS:
            result.append(line)
            skips = True
            continue
        places = [place for place, other in enumerate(rest) if pattern(other) == pattern(line)]
        place = places[0] if places else -1
        assert place == 0 or (place > 0 and skips), f"not printed here: {line}\nprinted: {rest[:40]}"
        result.append(rest[place])
        rest, skips = rest[place + 1 :], False
    assert skips or not [line for line in rest if line.strip()] or not lines, f"printed, and not shown: {rest[:40]}"
    return result


def run(command: str, folder: Path) -> list[str]:
    """What a command prints to standard output, with `spanax` and `python` on the PATH."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, module in (("spanax", "-m spanax "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (programs / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(folder / "cache")}
    environ.pop("XLA_FLAGS", None)  # those of these tests: a reader has none, and another compiler aborts at them
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return [line.rstrip() for line in done.stdout.splitlines()]


PARTS = [
    (path, match[1], block.text)
    for path in pages(ROOT)
    for block in blocks(path.read_text())
    if (match := re.match(r"# (\w+\.py)\n", block.text))
]

FILES = {
    name: "\n".join(text for part, other, text in PARTS if (part, other) == (path, name)) for path, name, _ in PARTS
}
"""The files that the pages write, by name, from all blocks of that name; a page may use those of another one."""

SHOWING = [path.relative_to(ROOT).as_posix() for path in pages(ROOT) if BLOCK.search(path.read_text())]


@pytest.mark.parametrize("page", sampled(SHOWING, ["README.md", "docs/tutorial-slurm.md"]))
def test_the_commands_of_a_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)

    def anew(match: re.Match[str]) -> str:
        items = [Shown(item.command, compared(item.lines, run(item.command, tmp_path))) for item in shown(match[1])]
        return "```console\n" + "".join("\n".join([f"$ {item.command}", *item.lines, ""]) for item in items) + "```"

    result = BLOCK.sub(anew, text)
    if os.environ.get("SPANAX_GOLDEN") == "update":
        (ROOT / page).write_text(result)


def test_output_that_differs_is_refused() -> None:
    printed = ["a plan of 8", "", "  step 1.5 s", "ranked", "fsdp 3"]
    assert compared(["a plan of 9", ELLIPSIS, "ranked", ELLIPSIS], printed) == [
        "a plan of 8",
        ELLIPSIS,
        "ranked",
        ELLIPSIS,
    ]
    for lines in (
        ["a plan of 9"],
        [ELLIPSIS, "fsdp 3", "ranked"],
        ["a plan of 8", "ranked", ELLIPSIS],
        ["a plan", ELLIPSIS],
    ):
        with pytest.raises(AssertionError):
            compared(lines, printed)


def test_a_command_continues_after_a_backslash() -> None:
    command = "spanax plan a \\\n    --on b"
    assert shown(f"$ {command}\nx \\\n  y\n$ ls\n") == [Shown(command, ["x \\", "  y"]), Shown("ls", [])]
