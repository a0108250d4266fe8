"""The generated pages of the site: `make golden` writes them, and tests/test_generated_pages.py compares them."""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import spanax
from spanax import cli
from spanax.commands.launch import LAUNCHERS
from spanax.errors import error_types
from spanax.train.config import MAX, MIN, TYPES, TrainConfig
from spanax.usage.examples import EXAMPLES
from spanax.usage.topics import MIN_FLAGS, Flag, by_topic

TROUBLESHOOTING = Path(__file__).parent / "troubleshooting.md"

NOTE = "`make golden` generates this page from the source."

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


def commands_page() -> str:
    """Returns docs/commands.md: every command with its examples, and every flag with its value, default and help."""
    listed = [
        [f"[`spanax {name}`](#spanax-{name.replace(' ', '-')})", summary(flags)] for name, flags in COMMANDS.items()
    ]
    parts = [
        f"# Commands and flags\n\n{NOTE} [The command line](command-line.md) describes what all\n"
        "commands share. `--help` prints the flags of a command; where they are many, `--help TOPIC` prints one topic.",
        table(("command", ""), listed),
    ]
    for name, flags in COMMANDS.items():
        parts.append(f"## spanax {name}\n\n{summary(flags)}")
        parts.append("```bash\n" + "\n".join(EXAMPLES[name]) + "\n```")
        parts += flag_tables(by_topic(flags))
    return "\n\n".join(parts) + "\n"


def flag_tables(topics: dict[str, list[Flag]]) -> list[str]:
    """Returns a table for each topic, as `--help` groups the flags; a single one if they are few."""
    if sum(map(len, topics.values())) < MIN_FLAGS:
        return [flag_table([flag for flags in topics.values() for flag in flags])]
    return [f"**{topic.capitalize()}**\n\n{flag_table(flags)}" for topic, flags in topics.items()]


def flag_table(flags: Sequence[Flag]) -> str:
    """Returns a table with a row for each flag."""
    rows = [[code(flag.text), code(flag.default), sentence(flag.summary)] for flag in flags]
    return table(("flag", "default", ""), rows)


def settings_page() -> str:
    """Returns docs/settings.md: every key of the TOML file of `spanax train --config`."""
    defaults, hints = TrainConfig(), get_type_hints(TrainConfig, include_extras=True)
    summaries = {flag.field: flag for flags in by_topic(TrainConfig).values() for flag in flags}
    sections = []
    for topic, flags in by_topic(TrainConfig).items():
        rows = []
        for name in (flag.field for flag in flags if flag.field not in ("config", "traceback")):
            default = getattr(defaults, name)
            shown = "" if default is None else toml(default)
            rows.append(
                [code(name), type_name(hints[name]), limits(name), code(shown), sentence(summaries[name].summary)]
            )
        sections.append(f"## {topic.capitalize()}\n\n" + table(("key", "type", "range", "default", ""), rows))
    head = f"""# Settings in TOML

{NOTE} `spanax train --config settings.toml` reads
settings from a file; flags override it. The keys are the flags of
[`spanax train`](commands.md#spanax-train), with underscores. An unknown key, a value of another type and
a value out of its range raise. The `config.toml` of a run folder has the same keys.
[A cluster file](hardware.md#a-cluster-file) describes devices.

```toml
workload = "gpt2"
mesh = "fsdp=4,model=2"
steps = 1000
lr = 3e-4
output_dir = "runs/a"
```"""
    return "\n\n".join([head, *sections]) + "\n"


def api_page() -> str:
    """Returns docs/api.md: the public names by task, each with its documentation."""
    parts = [
        f"# Python API\n\n{NOTE} `import spanax` starts no device;\n"
        "each name is imported on first use. These names and their members are public ([stability](stability.md)).\n"
        "Values such as plans, searches and reports draw themselves as the last value of a notebook cell\n"
        "([pictures](pictures.md)). The site shows every signature and docstring; in a clone, use `help(spanax.jit)`."
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


def type_name(hint: Any) -> str:
    """Returns the words for the type of a TOML value."""
    while get_origin(hint) is not None or hasattr(hint, "__metadata__"):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return TYPES[hint]


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


def toml(value: Any) -> str:
    """Returns a default as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def troubleshooting_page() -> str:
    """Returns docs/troubleshooting.md: the page as it is, with the head of each entry from the type of its error.

    Causes and fixes are written by hand, below the head.
    """
    introduction, *entries = re.split(r"^## ", TROUBLESHOOTING.read_text(), flags=re.MULTILINE)
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
    "settings.md": settings_page,
    "api.md": api_page,
    "troubleshooting.md": troubleshooting_page,
}
"""By file: the function that returns its text."""
