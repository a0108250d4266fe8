"""What `spanax doctor` found, in words."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from spanax.doctor.verdict import Verdict
from spanax.printable import printable

_COLOURS = {"ok": 32, "warning": 33, "problem": 31}


def verdicts_json(found: Sequence[Verdict]) -> dict[str, Any]:
    """The contract of `spanax doctor --json`."""
    return {"is_well": is_well(found), "findings": [asdict(one) for one in found]}


def is_well(found: Sequence[Verdict]) -> bool:
    """Whether nothing found would stop a run."""
    return all(one.state != "problem" for one in found)


def verdicts_text(found: Sequence[Verdict], *, in_colours: bool = False) -> str:
    """A line a verdict, with where and what to do below those that are not well.

    Example:
      >>> print(verdicts_text([
      ...     Verdict("python", "ok", "3.11.7"),
      ...     Verdict("loopback", "problem", "this host cannot talk to itself.", fix="ip link set lo up"),
      ... ]))
      ok       python         3.11.7
      problem  loopback       this host cannot talk to itself.
                              fix: ip link set lo up
      1 problem, 0 warnings in 2 findings
    """
    lines = []
    for one in found:
        state = f"{one.state:7}"
        if in_colours:
            state = f"\x1b[{_COLOURS[one.state]}m{state}\x1b[0m"
        lines.append(f"{state}  {one.name:13}  {printable(one.what)}")
        told = {"where": one.where, "fix": one.fix} if one.state != "ok" else {}
        lines += [f"{'':24}{key}: {printable(text)}" for key, text in told.items() if text]
    problems, warnings = (sum(one.state == state for one in found) for state in ("problem", "warning"))
    lines.append(f"{_counted(problems, 'problem')}, {_counted(warnings, 'warning')} in {len(found)} findings")
    return "\n".join(lines)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
