"""The generated pages of the site: `make golden` writes them, and tests/test_generated_pages.py compares them."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
from tyro.conf import Positional

import spanax
from spanax import cli
from spanax.commands.launch import LAUNCHERS
from spanax.errors import error_types
from spanax.train.flags import MAX, MIN
from spanax.usage import EXAMPLES, OTHER_FLAGS, SAME_FLAGS

DOCS = Path(__file__).parent
COMMANDS_PAGE, ERRORS_PAGE = (DOCS / name for name in ("commands.md", "errors.md"))

FIRST = "## Flags of other tools"
"""The first generated section of docs/commands.md; what precedes it is written by hand."""

API: dict[str, tuple[str, ...]] = {
    "Sharded functions": ("jit", "init", "reshard", "shardings", "value_and_grad", "stack", "Stack"),
    "Tracing": ("trace", "Program", "Leaf", "Workload", "rule"),
    "Planning": ("cluster", "Cluster", "local", "plan", "Plan", "Placement", "MeshShape", "Layout", "search", "Search"),
    "Checking": ("check", "Report"),
    "Training": ("start", "Run", "Guard", "logged", "track"),
    "Data": ("batches", "Batches", "mixture", "Mixture", "local_batch"),
    "Checkpoints": ("Checkpoints", "restore"),
    "Processes and devices": ("distributed", "Group", "heartbeat", "simulate"),
    "Errors": ("SpanaxError", "DataError", "CompilerError", "NumbersError", "WriteError"),
}
"""The public names by task."""

COMMANDS: dict[str, Any] = {
    **{name: verb.flags for name, verb in cli.COMMANDS.items() if name != "launch"},
    **{f"launch {place}": flags for place, (flags, _) in LAUNCHERS.items()},
}
"""By command: the dataclass of its flags."""

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command.

    Attributes:
      field: the name of its field.
      text: the flag with the value that it takes, such as `--lr X`.
      summary: its description.
      default: its default; empty if the description states it, or if there is none.
    """

    field: str
    text: str
    summary: str
    default: str = ""


def listed(kind: type) -> list[Flag]:
    """Returns the flags of a command, positional ones first."""
    return sorted(flags_of(kind), key=lambda flag: flag.text.startswith("--"))


def flags_of(kind: type) -> Iterator[Flag]:
    """Yields the flags of a command, with those of its groups."""
    documented = [param for base in kind.__mro__[::-1] for param in docstring_parser.parse(base.__doc__ or "").params]
    summaries = {param.arg_name: " ".join((param.description or "").split()) for param in documented}
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        inner = next(iter(get_args(hints[field.name])), hints[field.name])
        if dataclasses.is_dataclass(inner):
            yield from flags_of(inner)
        else:
            yield flag_of(field, hints[field.name], summaries.get(field.name, ""))


def flag_of(field: "dataclasses.Field[Any]", hint: Any, summary: str) -> Flag:
    """Returns the flag of a field."""
    extras = getattr(hint, "__metadata__", ())
    is_positional = any(extra in get_args(Positional[int])[1:] for extra in extras)
    word = "--" + (next((extra.name for extra in extras if getattr(extra, "name", None)), None) or field.name)
    word = word.replace("_", "-")
    is_required = field.default is field.default_factory is dataclasses.MISSING and not is_positional
    default = "required" if is_required else field.default
    if isinstance(default, bool):
        text = f"--no-{word[2:]}" if default else word
    else:
        text = field.name.upper() if is_positional else f"{word} {metavar(hint)}"
    is_value = default not in (None, "", (), dataclasses.MISSING) and not isinstance(default, bool)
    return Flag(field.name, text, summary, str(default) if is_value and "Default:" not in summary else "")


def metavar(hint: Any) -> str:
    """Returns what stands for the value of a flag."""
    if hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    parts = [part for part in get_args(hint) if part not in (NoneType, ...)]
    return " ".join(map(metavar, parts)) if parts else METAVARS.get(hint, "TEXT")


def commands_page() -> str:
    """Returns docs/commands.md: the page as it is up to `FIRST`, then every command with its examples and flags."""
    overview = [
        [f"[`spanax {name}`](#spanax-{name.replace(' ', '-')})", summary(flags)] for name, flags in COMMANDS.items()
    ]
    parts = [COMMANDS_PAGE.read_text().partition(FIRST)[0].strip(), other_tools(), "## The commands"]
    parts.append(table(("command", ""), overview))
    for name, flags in COMMANDS.items():
        parts.append(f"## spanax {name}\n\n{summary(flags)}")
        parts.append("```text\n" + "\n".join(EXAMPLES[name]) + "\n```")
        parts.append(flag_table(listed(flags)))
    return "\n\n".join(parts) + "\n"


def other_tools() -> str:
    """Returns the section on flags of other tools: those with one answer share a row."""
    answers = {name: f"`--{ours}`, the same" for name, ours in SAME_FLAGS.items()}
    answers |= {name: sentence(text) for name, text in OTHER_FLAGS.items()}
    names: dict[str, list[str]] = {}
    for name, text in answers.items():
        names.setdefault(text, []).append(code(f"--{name}"))
    head = (
        "`spanax train` accepts flags of accelerate, torchrun, Hugging Face, Lightning, MaxText and Levanter that\n"
        "mean the same as one of its own. For the others an error says what to write."
    )
    return f"{FIRST}\n\n{head}\n\n" + table(("flag", ""), [[", ".join(flags), text] for text, flags in names.items()])


def flag_table(flags: Sequence[Flag]) -> str:
    """Returns a table with a row for each flag."""
    rows = [[code(flag.text), limits(flag.field), code(flag.default), sentence(flag.summary)] for flag in flags]
    return table(("flag", "range", "default", ""), rows)


def api_page() -> str:
    """Returns docs/api.md: the public names by task, each with its documentation."""
    parts = [
        "# Python API\n\n`import spanax` starts no device;\n"
        "each name is imported on first use. These names and their members are public ([stability](stability.md)).\n"
        "Values such as plans, searches and reports draw themselves as the last value of a notebook cell\n"
        "([pictures](monitoring.md)). The site shows every signature and docstring; in a clone, use `help(spanax.jit)`."
    ]
    for task, names in API.items():
        rows = [[code(f"spanax.{name}"), sentence(first_line(getattr(spanax, name)))] for name in names]
        parts += [f"## {task}\n\n{table(('name', ''), rows)}", *map(directive, names)]
    return "\n\n".join(parts) + "\n"


def directive(name: str) -> str:
    """Returns the directive of autodoc that documents a public name."""
    value = getattr(spanax, name)
    if not inspect.isclass(value):
        kind, members = "autofunction", ""
    elif issubclass(value, Exception):
        kind, members = "autoexception", ""
    else:
        kind, members = "autoclass", "\n   :members:"
    return f"```{{eval-rst}}\n.. {kind}:: spanax.{name}{members}\n```"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines)


def code(text: str) -> str:
    """Returns text as code in the cell of a table; empty text stays empty."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def sentence(text: str) -> str:
    """Returns a description as the cell of a table."""
    return text.strip().replace("|", "\\|").replace("<", "&lt;")


def summary(kind: Any) -> str:
    """Returns the first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def first_line(value: Any) -> str:
    """Returns the first sentence of a docstring."""
    return summary(value).partition(". ")[0].rstrip(".") + "."


def limits(name: str) -> str:
    """Returns the range of a number, such as `1 to 1024`."""
    if name not in MIN:
        return ""
    return f"{number(MIN[name])} to {number(MAX[name])}" if name in MAX else f"≥ {number(MIN[name])}"


def number(value: float) -> str:
    """Returns a number, powers of two as such."""
    for plus in (0, 1):
        power = int(value + plus).bit_length() - 1
        if power >= 20 and value + plus == 2**power:
            return f"2^{power}" + " - 1" * plus
    return f"{value:,g}"


def errors_page() -> str:
    """Returns docs/errors.md: the page as it is, with the head of each entry from the type of its error.

    Causes and fixes are written by hand, below the head.
    """
    introduction, *entries = re.split(r"^## ", ERRORS_PAGE.read_text(), flags=re.MULTILINE)
    bodies = {
        entry[:6]: entry.partition("*\n\n")[2].partition("\n\n")[2].strip() for entry in entries if entry[:3] == "SPX"
    }
    others = [f"## {entry.strip()}" for entry in entries if entry[:3] != "SPX"]
    parts = [introduction.strip()]
    for kind in error_types():
        words = re.findall(r"[A-Z][a-z]+", kind.__name__.removesuffix("Error"))
        title = " ".join(words).lower().replace("spanax", "invalid request")
        head = f"## {kind.code}: {title}\n\n*`spanax.errors.{kind.__name__}`, exit code {kind.exit_code}*"
        parts += [head, summary(kind).partition("; exit code")[0].rstrip(".") + ".", bodies.get(kind.code, "")]
    return "\n\n".join([*filter(None, parts), *others]) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "api.md": api_page,
    "errors.md": errors_page,
}
"""By file: the function that returns its text."""
