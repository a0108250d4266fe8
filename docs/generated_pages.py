"""The generated pages of the site: `make golden` writes them, and tests/test_generated_pages.py compares them."""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
from tyro.conf import Positional

import spanax
from spanax import cli
from spanax.check.lint.lint import PROFILE_RULES, RULES
from spanax.commands import models
from spanax.commands.launch import LAUNCHERS
from spanax.errors import error_types
from spanax.hardware.chip import Chip, Link
from spanax.hardware.chips import catalogue
from spanax.hardware.slices import shape_text
from spanax.interop.configs import families
from spanax.plan.presets import MEANING, PRESETS, STORED
from spanax.train.config import TrainConfig
from spanax.train.flags import MAX, MIN
from spanax.units import bytes_text, quantity_text
from spanax.usage import EXAMPLES, OTHER_FLAGS, SAME_FLAGS

DOCS = Path(__file__).parent
END = "<!-- end -->"

NOTE = "`make golden` generates this page from the source."

GENERATED = "<!-- generated: make golden -->"
"""What follows this line of a page is generated; what precedes it is written by hand."""

SHARED = "## Shared flags\n\nFlags that several commands have; the section of a command names them."

RUNS_ANYWHERE = r"spanax (axes|plan|models|doctor|export-rules|(train|check|compare|launch local .*) ?gpt-nano)"
NEEDS_FILES = r"\.(json|toml|py)\b|my_|runs/a|weights/|--hosts"

API: dict[str, tuple[str, ...]] = {
    "Sharded functions": (
        "jit",
        "init",
        "reshard",
        "shardings",
        "value_and_grad",
        "partition_like",
        "stack",
        "Stack",
    ),
    "Tracing": ("trace", "Program", "Leaf", "Workload", "rule"),
    "Planning": ("cluster", "Cluster", "local", "plan", "Plan", "Placement", "MeshShape", "Layout", "search", "Search"),
    "Checking": ("check", "Report"),
    "Training": ("start", "Run", "Guard", "logged", "track"),
    "Fine-tuning": ("lora", "losses"),
    "Generation": ("generate", "decode"),
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
    """Returns docs/commands.md: every command with its examples and flags, and the keys of TOML files."""
    overview = [
        [f"[`spanax {name}`](#spanax-{name.replace(' ', '-')})", summary(flags)] for name, flags in COMMANDS.items()
    ]
    parts = [written("commands.md"), table(("command", ""), overview)]
    parts.append(f"{SHARED}\n\n{flag_table(shared_flags())}")
    for name, flags in COMMANDS.items():
        parts.append(f"## spanax {name}\n\n{summary(flags)}")
        parts += examples(EXAMPLES[name])
        parts += command_flags(listed(flags))
    return "\n\n".join([*parts, settings(), other_tools()]) + "\n"


def shared_flags() -> list[Flag]:
    """Returns the flags that several commands have, with one default and description."""
    counts = Counter(flag for kind in COMMANDS.values() for flag in listed(kind) if flag.text.startswith("--"))
    return [flag for flag, count in counts.items() if count > 1]


def command_flags(flags: Sequence[Flag]) -> list[str]:
    """Returns the table of the flags that a command has alone, and the names of those that others have too."""
    shared = shared_flags()
    own = [flag for flag in flags if flag not in shared]
    names = ", ".join(code(flag.text.split()[0]) for flag in flags if flag in shared)
    return [*([flag_table(own)] if own else []), *([f"[Shared](#shared-flags): {names}."] if names else [])]


def written(name: str) -> str:
    """Returns the part of a page that is written by hand, with the line that ends it."""
    return (DOCS / name).read_text().partition(GENERATED)[0] + GENERATED


def examples(lines: Sequence[str]) -> list[str]:
    """Returns blocks of example commands: those that run on any machine, and those that need files."""
    is_run = {line: bool(re.match(RUNS_ANYWHERE, line)) and not re.search(NEEDS_FILES, line) for line in lines}
    runs = "\n".join(line for line in lines if is_run[line])
    others = "\n".join(line for line in lines if not is_run[line])
    blocks = [runs, others and f"# needs: your own files\n{others}"]
    return [f"```bash\n{block}\n```" for block in blocks if block]


def flag_table(flags: Sequence[Flag]) -> str:
    """Returns a table with a row for each flag."""
    rows = [[code(flag.text), code(flag.default), sentence(flag.summary)] for flag in flags]
    return table(("flag", "default", ""), rows)


def settings() -> str:
    """Returns the section on the keys of the TOML file of `spanax train --config`."""
    fields = [flag.field for flag in listed(TrainConfig)]
    rows = [[code(field), limits(field)] for field in fields if field in MIN]
    head = """## Settings

`spanax train --config settings.toml` reads settings from a file; flags override it. The keys are the flags of
[`spanax train`](#spanax-train) except `--config` and `--traceback`, with underscores: `TEXT` is a string, `N` an
integer, `X` a number, and a flag without a value is true or false. An unknown key, a value of another type and a value
out of its range raise. The `config.toml` of a run folder has the same keys.

```toml
workload = "gpt2"
mesh = "fsdp=4,model=2"
steps = 1000
learning_rate = 3e-4
output_dir = "runs/a"
```"""
    return f"{head}\n\n{table(('key', 'range'), rows)}"


def other_tools() -> str:
    """Returns the section on flags of other tools: those with one answer share a row."""
    answers = {name: f"`--{ours}`, the same" for name, ours in SAME_FLAGS.items()}
    answers |= {name: sentence(text) for name, text in OTHER_FLAGS.items()}
    names: dict[str, list[str]] = {}
    for name, text in answers.items():
        names.setdefault(text, []).append(code(f"--{name}"))
    head = """## Flags of other tools

`spanax train` accepts flags of accelerate, torchrun, Hugging Face, Lightning, MaxText and Levanter that mean the same
as one of its own. For the others an error says what to write."""
    return f"{head}\n\n" + table(("flag", ""), [[", ".join(flags), text] for text, flags in names.items()])


def api_page() -> str:
    """Returns docs/api.md: the public names by task, each with its documentation."""
    parts = [
        f"# Python API\n\n{NOTE} `import spanax` starts no device;\n"
        "each name is imported on first use. These names and their members are public ([stability](stability.md)).\n"
        "Values such as plans, searches and reports draw themselves as the last value of a notebook cell\n"
        "([pages](monitoring.md#report)). The site shows every docstring; in a clone, use `help(spanax.jit)`."
    ]
    for task, names in API.items():
        rows = [[code(f"spanax.{name}"), sentence(first_line(getattr(spanax, name)))] for name in names]
        parts += [f"## {task}\n\n{table(('name', ''), rows)}", *map(directive, names)]
    return "\n\n".join(parts) + "\n"


def directive(name: str) -> str:
    """Returns the directive of autodoc that documents a public name."""
    value = getattr(spanax, name)
    if type(value) is ModuleType:
        kind, members = "automodule", "\n   :members:"
    elif not inspect.isclass(value):
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
    introduction, *entries = re.split(r"^## ", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)
    bodies = {entry[:6]: entry.partition("*\n\n")[2].strip() for entry in entries if entry[:3] == "SPX"}
    others = [f"## {entry.strip()}" for entry in entries if entry[:3] != "SPX"]
    parts = [introduction.strip()]
    for kind in error_types():
        words = re.findall(r"[A-Z][a-z]+", kind.__name__.removesuffix("Error"))
        title = " ".join(words).lower().replace("spanax", "invalid request")
        head = f"## {kind.code}: {title}\n\n*`spanax.errors.{kind.__name__}`, exit code {kind.exit_code}*"
        parts += [head, bodies.get(kind.code, "")]
    return "\n\n".join([*filter(None, parts), *others]) + "\n"


def lint_table() -> str:
    """Returns the lint rules: when each of them reports, and the cost of the problem."""
    rows = []
    for rule in sorted((*RULES, *PROFILE_RULES), key=lambda rule: rule.code):
        meaning = f"{' '.join((rule.find.__doc__ or '').split())} {rule.why}"
        rows.append([rule.code, rule.find.__name__.replace("_", " "), rule.severity.value, sentence(meaning)])
    return table(("code", "problem", "severity", "meaning"), rows)


def with_tables(page: str, tables: dict[str, Callable[[], str]]) -> str:
    """Returns a page as it is, with each table of it from the source: name to the function that returns it."""
    text = (DOCS / page).read_text()
    for name, table_of in tables.items():
        mark = f"<!-- table: {name} (make golden) -->\n"
        begin, rest = text.split(mark)
        text = f"{begin}{mark}{table_of()}\n{END}{rest.partition(END)[2]}"
    return text


def layouts_table() -> str:
    """Returns the presets: their mesh axes, and the state that they shard in storage besides."""
    words = {"optimizer": "optimizer state", "gradient": "gradients", "param": "parameters"}
    rows = []
    for name, axes in PRESETS.items():
        stored = [words[kind] for kind in STORED.get(name, words)]
        rows.append([code(name), ", ".join(axes), f"{', '.join(stored)} over fsdp" if "fsdp" in axes else ""])
    return table(("layout", "mesh axes", "also sharded in storage"), rows)


def mesh_axes_table() -> str:
    """Returns the axes that each mesh axis shards."""
    return table(("mesh axis", "shards"), [[code(axis), ", ".join(names)] for axis, names in MEANING.items()])


def models_table() -> str:
    """Returns the named workloads; descriptions and sources are written by hand, in the table of the page."""
    cells = [re.split(r" ?\| ?", line) for line in (DOCS / "models.md").read_text().splitlines()]
    written = {row[1]: (row[2], row[5]) for row in cells if len(row) == 7}
    rows = []
    for workload in models.answer(models.ModelsCommand()).data["models"]:
        name = code(workload["name"])
        model, source = written.get(name, ("", ""))
        rows.append([name, model, f"{workload['parameters']:,}", batch_text(workload["batch"]), source])
    return table(("workload", "model", "parameters", "batch", "source"), rows)


def batch_text(batch: dict[str, list[int]]) -> str:
    """Returns the size of a batch, such as `8 of 1,024 tokens`."""
    examples, *size = next(iter(batch.values()))
    what = f"{size[0]:,} tokens" if len(size) == 1 else f"{size[0]} x {size[1]} pixels"
    return f"{examples} of {what}"


def chips_table() -> str:
    """Returns the peaks of the chips."""
    rows = []
    for chip in catalogue().values():
        bf16 = peak_text(chip, "bf16") if "bf16" in chip.peak_flops else f"none; fp16: {peak_text(chip, 'fp16')}"
        rows.append([code(chip.name), bf16, *(peak_text(chip, dtype) for dtype in ("fp32", "fp8", "int8"))])
    return table(("chip", "bf16", "float32", "fp8", "int8"), by_figures(rows))


def by_figures(rows: list[list[str]]) -> list[list[str]]:
    """Returns rows with those of equal figures as one, under both names."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *figures in rows:
        names.setdefault(tuple(figures), []).append(name)
    return [[", ".join(some), *figures] for figures, some in names.items()]


def links_table() -> str:
    """Returns the memory and the links of the chips."""
    rows = []
    for chip in catalogue().values():
        sizes = [bytes_text(size) for size in (chip.memory_bytes, chip.usable_bytes) if size]
        rate = rate_text(chip.memory_bytes_per_second, "bytes per second", chip.memory_share)
        inside = link_text(chip.inside) + largest_text(chip.inside)
        rows.append([code(chip.name), ", ".join(sizes) or "the host's", rate, inside, link_text(chip.between)])
    return table(("chip", "memory, usable", "memory rate", "inside, largest", "between"), by_figures(rows))


def peak_text(chip: Chip, dtype: str) -> str:
    """Returns the peak of a dtype, with the share that the best matmul achieves."""
    return rate_text(chip.peak_flops.get(dtype), "operations per second", chip.matmul_shares.get(dtype, 1.0))


def rate_text(value: float | None, kind: str, share: float) -> str:
    """Returns a rate with the share of it that is achieved."""
    if value is None:
        return "-"
    return quantity_text(value, kind) + (f" x {quantity_text(share, 'share', 3)}" if share != 1 else "")


def largest_text(link: Link | None) -> str:
    """Returns how many devices a link joins at most, or the largest torus, after a comma; empty if unknown."""
    largest = link and (shape_text(link.max_shape) if link.max_shape else link.max_devices)
    return f", {largest}" if largest else ""


def link_text(link: Link | None) -> str:
    """Returns a link with its rate."""
    return f"{link.name} {rate_text(link.bytes_per_second, 'bytes per second', link.share)}" if link else "-"


def families_table() -> str:
    """Returns the families of Hugging Face: what each reads, the class of the model, and that in transformers."""
    rows = []
    for family in families().values():
        as_model = f" or {code(family.model)}" if family.example and family.model != family.name else ""
        into = f"`--into` {code(family.example)}" if family.example else f"built in ({code(family.model)})"
        rows.append([code(family.name) + as_model, family.about, into, code(family.architecture)])
    return table(("`--as`", "reads", "class", "class of transformers"), rows)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "check.md": {"lint": lint_table},
    "generate.md": {"families": families_table},
    "hardware.md": {"chips": chips_table, "links": links_table},
    "layouts.md": {"axes": mesh_axes_table, "layouts": layouts_table},
    "models.md": {"workloads": models_table},
}
"""By file and name: the functions that return the tables of pages that are written by hand."""

PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "api.md": api_page,
    "errors.md": errors_page,
    **{page: partial(with_tables, page, tables) for page, tables in TABLES.items()},
}
"""By file: the function that returns its text."""
