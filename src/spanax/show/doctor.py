"""Formats the verdicts of `spanax doctor` as text and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from spanax.doctor.machine import Verdict
from spanax.printable import printable

_COLOURS = {"ok": 32, "warning": 33, "problem": 31}


def verdicts_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns the object of `spanax doctor --json`."""
    return {"is_well": is_well(verdicts), "findings": [asdict(verdict) for verdict in verdicts]}


def is_well(verdicts: Sequence[Verdict]) -> bool:
    """Whether no verdict is a problem."""
    return all(verdict.state != "problem" for verdict in verdicts)


def verdicts_text(verdicts: Sequence[Verdict], *, in_colours: bool = False) -> str:
    """Returns one line per verdict; below those that are not ok, where and how to fix them."""
    lines = []
    for verdict in verdicts:
        state = f"{verdict.state:7}"
        if in_colours:
            state = f"\x1b[{_COLOURS[verdict.state]}m{state}\x1b[0m"
        lines.append(f"{state}  {verdict.name:13}  {printable(verdict.what)}")
        hints = {"where": verdict.where, "fix": verdict.fix} if verdict.state != "ok" else {}
        lines += [f"{'':24}{key}: {printable(text)}" for key, text in hints.items() if text]
    problems, warnings = (sum(verdict.state == state for verdict in verdicts) for state in ("problem", "warning"))
    lines.append(f"{_count_text(problems, 'problem')}, {_count_text(warnings, 'warning')} in {len(verdicts)} findings")
    return "\n".join(lines)


def _count_text(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
