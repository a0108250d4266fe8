"""Former names of flags and settings, which are accepted with a notice until version 0.2."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

SIZES = {"batch": "global_batch_size", "seq": "seq_len"}
SCHEDULE = {"schedule": "pipeline_schedule", "chunks": "virtual_stages"}
FOLDER = {"out": "output_dir"}

RENAMED: dict[str, dict[str, str]] = {
    "train": {
        **SIZES,
        **SCHEDULE,
        **FOLDER,
        "keep": "keep_last",
        "spike": "spike_factor",
        "patience": "max_bad_steps",
    },
    "plan": {**SIZES, "max": "solve_for", "min": "solve_for"},
    "check": SIZES | SCHEDULE,
    "compare": SIZES,
    "axes": SIZES,
    "export-rules": SIZES,
    "import": FOLDER,
    "export": FOLDER,
    "doctor": FOLDER,
    "launch local": {"hosts": "processes", "devices_per_host": "devices_per_process"},
}
"""By command: the former names of its flags, with their names now. Settings of a file have those of `train`."""

VALUES = {("plan", "--pipeline", "True"): ["--pipeline"], ("plan", "--pipeline", "False"): ["--no-pipeline"]}
"""By command, flag and value that the flag formerly took: the flags that replace both."""


def current_arguments(command: str, argv: Sequence[str]) -> list[str]:
    """Returns the arguments of a command with the current names of its flags, and prints a notice for each former one.

    Args:
      command: the command, such as `train` or `launch local`.
      argv: its arguments, up to a `--` if there is one.

    Example:
      >>> current_arguments("axes", ["gpt2", "--global-batch-size", "8"])
      ['gpt2', '--global-batch-size', '8']
    """
    names, result, words = RENAMED.get(command, {}), list[str](), list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if replacement := VALUES.get((command, flag, value if equals or not words else words[0])):
            word = word if equals else f"{word} {words.pop(0)}"
            _notice(word, " ".join(replacement))
            result += replacement
            continue
        name = names.get(flag[2:].replace("-", "_")) if flag.startswith("--") else None
        if name is not None:
            _notice(flag, _flag(name))
        result.append(word if name is None else _flag(name) + equals + value)
    return result


def current_settings(settings: Mapping[str, Any], where: str | None = None) -> dict[str, Any]:
    """Returns settings of `train` with their current names.

    If both names of a setting are present, the former one is returned as it is: an unknown setting.

    Args:
      settings: the settings by name.
      where: the file in which a user wrote them; a notice is printed for each former name.

    Example:
      >>> current_settings({"batch": 8, "steps": 10})
      {'global_batch_size': 8, 'steps': 10}
    """
    names = {old: new for old, new in RENAMED["train"].items() if old in settings and new not in settings}
    for old, new in names.items() if where else ():
        _notice(f"'{old}' in {where}", f"'{new}'")
    return {names.get(name, name): value for name, value in settings.items()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _notice(old: str, new: str) -> None:
    print(f"spanax: note: {old} is now {new}; version 0.2 drops the former name.", file=sys.stderr)
