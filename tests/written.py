"""Code and commands in pages and help texts."""

import ast
import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from markdown_it import MarkdownIt

from spanax import cli
from spanax.commands.launch import LAUNCHERS
from spanax.errors import SpanaxError, nearest
from spanax.hardware.cluster import cluster
from spanax.hardware.mesh import MeshShape
from spanax.launch.request import TRAIN, request_of
from spanax.models.workloads import WORKLOADS
from spanax.plan.presets import PRESETS, layout_for
from spanax.train.config import check


class Block(NamedTuple):
    """A block of code or output of a page: its kind, its text, the line it begins at, and the language of its fence."""

    kind: str
    text: str
    line: int
    info: str = ""


@functools.cache
def blocks(page: str) -> list[Block]:
    """Every block of code of a page in Markdown, fenced or indented."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    results = [token for token in tokens if token.type in ("fence", "code_block") and token.map]
    return [
        Block(_kind(info := item.info.strip(), item.content), item.content, item.map[0] + 1, info) for item in results
    ]


def _kind(info: str, text: str) -> str:
    first = text.lstrip().partition("\n")[0]
    if info and info not in ("python", "console", "bash"):
        return info
    if first.startswith(">>> "):
        return "doctest"
    if info == "python":
        return "python"
    if any(re.match(r"(\w+=\S+ )*(spanax|pip|make|python) ", line) for line in text.splitlines()):
        return "commands"
    return "python" if _is_python(text) else "text"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return looks_like_python(text)
    return True


def looks_like_python(text: str) -> bool:
    """Whether a line imports or calls Spanax; the text may still be invalid, which running it shows."""
    return bool(re.search(r"^(import \w|from \S+ import |.*\bspanax\.\w+\()", text, re.MULTILINE))


def commands(text: str) -> Iterator[str]:
    """The command lines of Spanax in a block."""
    for line in text.replace("\\\n", " ").splitlines():
        if re.match(r"(\w+=\S+ )*spanax ", line.strip()):
            yield line.strip()


def read(line: str) -> Any:
    """The flags of a command line, as the command line parses them.

    Raises:
      SpanaxError: it names a workload, machine, mesh or layout that does not exist.
      SystemExit: it has a flag that does not exist.
    """
    words = shlex.split(line.partition(" > ")[0], comments=True)
    words = words[words.index("spanax") + 1 :]
    if words[0] in ("--version", "--help", "--print-completion"):
        return None
    if words[0] == "launch":
        index = words.index("--") if "--" in words else len(words)
        tyro.cli(LAUNCHERS[words[1]][0], prog=line, args=words[2:index])
        if words[index + 1] != TRAIN:
            if words[index + 1] in cli.COMMANDS:
                raise SpanaxError(f"'{words[index + 1]}' is a command that cannot be launched.")
            return None
        request_of(words[index + 1 :], None)
        return read(shlex.join(["spanax", *words[index + 1 :]]))
    if words[0] not in cli.COMMANDS:
        raise SpanaxError(f"there is no command '{words[0]}'.", fix=nearest(words[0], cli.COMMANDS))
    command = tyro.cli(cli.COMMANDS[words[0]].flags, prog=line, args=words[1:])
    if words[0] == "train":
        with absent_extras_are_fine():
            check(command)
    _known(command)
    return command


@contextmanager
def absent_extras_are_fine() -> Iterator[None]:
    """Accepts commands that need an extra that is not installed."""
    try:
        yield
    except SpanaxError as error:
        if 'pip install "spanax[' not in str(error):
            raise


def _known(command: Any) -> None:
    workload = getattr(command, "workload", None)
    if workload and workload not in WORKLOADS and not re.fullmatch(r"[\w/]+\.py:\w+|.*/.*", workload):
        raise SpanaxError(f"there is no workload '{workload}'.", fix=nearest(workload, WORKLOADS))
    on = getattr(command, "on", None) or ()
    for name in ",".join((on,) if isinstance(on, str) else on).split(","):
        if name and ".toml" not in name:
            cluster(name)
    command = getattr(command, "request", command)
    layout = getattr(command, "layout", None)
    if layout and layout.removesuffix("+seq") not in PRESETS:
        raise SpanaxError(f"there is no layout '{layout}'.", fix=nearest(layout, PRESETS))
    if mesh := getattr(command, "mesh", None):
        shape = MeshShape.of(mesh)
        if layout is None:
            layout_for(shape)


NEEDS = re.compile(r"# needs: ([\w ]+)")
EXTRAS = {"tpu extra": "libtpu", "cuda12 extra": "jax_plugins.xla_cuda12", "tensorboardX": "tensorboardX"}
ELSEWHERE = {
    "a GPU", "a TPU", "Slurm", "Kubernetes", "Ray", "a network", "several machines", "your own files", "an install",
    "a clone",
}  # fmt: skip
"""What a block of commands can need that is not there when the pages are tested."""


def is_run_here(block: str) -> bool:
    """Whether the commands of a block can run here: its first line may say what they need."""
    match = NEEDS.match(block)
    if not match:
        return True
    if match[1] in ELSEWHERE:
        return False
    try:
        return importlib.util.find_spec(EXTRAS[match[1]]) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def pages(root: Path) -> list[Path]:
    """The pages that users read."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]
