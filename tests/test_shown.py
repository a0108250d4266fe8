"""Every command of a page runs and prints what the page shows: in order, numbers by pattern (`make golden` updates it).

A block fenced as `console` holds commands after `$ ` and their output; `...` stands for any lines. A block fenced as
`bash` is a script. Python that begins with `# NAME.py` is the file of that name, or a part of it. The commands of a
page run in order, in one folder with these files. A block that needs what is not here says so in its first line, such
as `# needs: Slurm`.
"""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from sampling import sampled
from written import blocks, commands, is_run_here, pages

ROOT = Path(__file__).resolve().parent.parent
ELLIPSIS = "..."
SECONDS = 300

BLOCK = re.compile(r"^```(console|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
    (path.relative_to(ROOT).as_posix(), match[1], block.text)
    for path in pages(ROOT)
    for block in blocks(path.read_text())
    if (match := re.match(r"# (\w+\.py)\n", block.text))
]


def files(page: str) -> dict[str, str]:
    """The files that the pages write, by name; a page may use those of another one, unless it writes its own."""
    result = {}
    for path, name, _ in sorted(PARTS, key=lambda part: part[0] == page):
        result[name] = "\n".join(text for part, other, text in PARTS if (part, other) == (path, name))
    return result


WITH_COMMANDS = [path.relative_to(ROOT).as_posix() for path in pages(ROOT) if BLOCK.search(path.read_text())]
TODAY = WITH_COMMANDS[datetime.now(UTC).toordinal() % len(WITH_COMMANDS)]
"""The page whose turn it is in `make test`; `make slow` runs the others."""


@pytest.mark.parametrize("page", sampled(WITH_COMMANDS, {"README.md", TODAY}))
def test_the_commands_of_a_page_run_and_print_what_it_shows(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    for name, code in files(page).items():
        (tmp_path / name).write_text(code)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def anew(match: re.Match[str]) -> str:
        language, block = match.groups()
        if not is_run_here(block):
            return match[0]
        if language == "bash":
            run(f"set -e\n{block}", tmp_path)
            return match[0]
        items = [Shown(item.command, compared(item.lines, run(item.command, tmp_path))) for item in shown(block)]
        shown_again = "".join("\n".join([f"$ {item.command}", *item.lines, ""]) for item in items)
        return f"```console\n{block.partition('$ ')[0]}{shown_again}```"

    result = BLOCK.sub(anew, text)
    if os.environ.get("SPANAX_GOLDEN") == "update":
        (ROOT / page).write_text(result)


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in pages(ROOT)])
def test_commands_are_fenced_so_that_they_run(page: str) -> None:
    lines = [block for block in blocks((ROOT / page).read_text()) if block.info not in ("console", "bash")]
    assert not [command for block in lines if block.info in ("", "sh", "shell") for command in commands(block.text)]


def test_a_block_says_what_it_needs() -> None:
    assert is_run_here("spanax plan gpt2 --on h100:8\n") and not is_run_here("# needs: Slurm\nsbatch job.sh\n")
    with pytest.raises(KeyError):
        is_run_here("# needs: patience\nspanax train gpt2\n")


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
