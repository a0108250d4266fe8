"""The flags of commands, grouped by topic, and the text of `--help`."""

import dataclasses
import os
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import docstring_parser
from tyro.conf import Positional

from spanax.errors import UnknownNameError, nearest
from spanax.usage.examples import EXAMPLES

TOPICS: dict[str, tuple[str, ...]] = {
    "model": ("workload", "global_batch_size", "seq_len", "layers", "embed", "init", "init_partial", "seed"),
    "machine": ("on", "devices", "calibrate", "out_cluster"),
    "layout": (
        "layout", "mesh", "plan", "pipeline", "no_pipeline", "microbatches", "pipeline_schedule", "virtual_stages",
        "pad",
    ),
    "memory": ("dtype", "optimizer_state", "remat", "attention", "loss_chunks", "offload", "accumulate"),
    "data": ("data", "field", "tokenizer"),
    "training": ("steps", "steps_per_call", "lr", "eval_every", "eval_batches", "config", "xla_flags"),
    "checkpoints": ("output_dir", "resume", "accept_changed_model", "save_every", "keep_last"),
    "faults": ("on_bad_step", "spike_factor", "max_bad_steps"),
    "questions": ("solve_for", "target_mfu", "tokens", "budget_hours", "save_seconds", "explain", "diff"),
    "compiler": ("level", "timeout", "codegen", "inputs_only", "cache"),
    "findings": ("collectives", "explain_collective", "profiled", "parity", "fail_on"),
    "processes": (
        "processes", "devices_per_process", "hosts", "devices_per_host", "device", "cpus_per_host", "together", "start",
    ),
    "job": (
        "image", "claim", "mount", "node_selector", "namespace", "partition", "account", "time", "address",
        "wait_seconds", "name", "logs", "python", "extra", "dry_run",
    ),
    "supervisor": ("restarts", "stuck_seconds", "quiet_seconds", "stop_seconds", "backoff_seconds"),
    "output": ("top", "all", "out", "html", "log_every", "track", "profile", "json", "traceback"),
}  # fmt: skip
"""By topic: the fields of commands whose flags belong to it."""

MIN_FLAGS = 14
"""A command with fewer flags describes all of them at once."""

REQUIRED = "required"
"""The default of a flag that has none."""

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


def help_request(argv: Sequence[str]) -> str | None:
    """Returns the topic after `-h` or `--help`, empty if there is none, or None without such a flag.

    Example:
      >>> help_request(["--help", "layout"]), help_request(["gpt2", "-h"]), help_request(["gpt2"])
      ('layout', '', None)
    """
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    for index, word in enumerate(words):
        if word in ("-h", "--help"):
            return words[index + 1] if index + 1 < len(words) else ""
    return None


def help_text(name: str, kind: type, topic: str, width: int | None = None) -> str:
    """Returns the help of a command: one topic, all of them, or an overview if it has many flags.

    Args:
      name: the command.
      kind: the dataclass of its flags.
      topic: a topic, `all`, or empty.
      width: columns of the text. Default: those of the terminal, at most 100.

    Raises:
      SpanaxError: the command has no flags of that topic.
    """
    width = width or min(_terminal_columns(), 100)
    flags = by_topic(kind)
    if topic not in ("", "all", *flags):
        raise UnknownNameError(f"spanax {name} has no topic '{topic}'.", fix=nearest(topic, flags))
    positional = "".join(f" [{flag.text}]" for flag in _flags(kind) if not flag.text.startswith("--"))
    command = " -- COMMAND" if name.startswith("launch ") else ""
    head = [f"usage: spanax {name}{positional} [flags]{command}", "", _summary(kind, width), ""]
    head += [*(f"  {example}" for example in EXAMPLES.get(name, ())), ""]
    if topic in flags:
        return "\n".join([f"spanax {name}: {topic}", "", *_described(flags[topic], width)])
    if topic == "all" or sum(map(len, flags.values())) < MIN_FLAGS:
        return "\n".join([*head, *_described([flag for group in flags.values() for flag in group], width)])
    note = f"spanax {name} --help TOPIC describes the flags of a topic; --help all describes all."
    listed = textwrap.wrap(note, width)
    for title, group in flags.items():
        words = " ".join(flag.text.split()[0] for flag in group)
        listed += textwrap.wrap(
            words, width, initial_indent=f"  {title:<13}", subsequent_indent=" " * 15, break_on_hyphens=False
        )
    return "\n".join(head + listed)


def _terminal_columns() -> int:
    """Returns the width of the terminal of standard output, or 80 if it is not a terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 80


def by_topic(kind: type) -> dict[str, list[Flag]]:
    """Returns the flags of a command by topic."""
    flags = {flag.field: flag for flag in _flags(kind)}
    topics = {title: [flags.pop(name) for name in names if name in flags] for title, names in TOPICS.items()}
    if flags:
        topics = {"command": list(flags.values())} | topics
    return {title: group for title, group in topics.items() if group}


def _flags(kind: type) -> Iterator[Flag]:
    """Yields the flags of a command, with those of its groups."""
    summaries = {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for base in reversed(kind.__mro__)
        for parameter in docstring_parser.parse(base.__doc__ or "").params
    }
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        inner = typing.get_args(hints[field.name])[0] if typing.get_args(hints[field.name]) else hints[field.name]
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            yield from _flags(inner)
        else:
            yield _flag(field, hints[field.name], summaries.get(field.name, ""))


def _flag(field: "dataclasses.Field[Any]", hint: Any, summary: str) -> Flag:
    extras = getattr(hint, "__metadata__", ())
    name = next((extra.name for extra in extras if getattr(extra, "name", None)), None) or field.name
    word = "--" + name.replace("_", "-")
    is_required = field.default is field.default_factory is dataclasses.MISSING and not _is_positional(hint)
    default = field.default if field.default is not dataclasses.MISSING else REQUIRED if is_required else None
    if isinstance(default, bool):
        text = f"--no-{word[2:]}" if default else word
    elif _is_positional(hint):
        text = field.name.upper()
    else:
        text = f"{word} {_metavar(hint)}"
    is_shown = default not in (None, "", ()) and not isinstance(default, bool) and "Default:" not in summary
    return Flag(field.name, text, summary, str(default) if is_shown else "")


def _is_positional(hint: Any) -> bool:
    markers = typing.get_args(Positional[int])[1:]
    return any(extra in markers for extra in getattr(hint, "__metadata__", ()))


def _metavar(hint: Any) -> str:
    """Returns what stands for the value of a flag in its help."""
    if hasattr(hint, "__metadata__"):
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    parts = [part for part in typing.get_args(hint) if part not in (NoneType, ...)]
    return " ".join(map(_metavar, parts)) if parts else METAVARS.get(hint, "TEXT")


def _default_text(flag: Flag) -> str:
    return flag.default if flag.default == REQUIRED else f"default: {flag.default}"


def _summary(kind: type, width: int) -> str:
    summary = (kind.__doc__ or "").partition("\n\n")[0]
    return textwrap.fill(" ".join(summary.split()), width)


def _described(flags: Sequence[Flag], width: int) -> list[str]:
    lines = list[str]()
    for flag in flags:
        lines.append(f"  {flag.text}")
        summary = f"{flag.summary} ({_default_text(flag)})" if flag.default else flag.summary
        lines += textwrap.wrap(
            summary, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return lines
