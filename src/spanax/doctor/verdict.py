"""Verdict: one thing that was looked at, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Verdict:
    """What was found of one thing.

    Attributes:
      name: the thing, such as `disk` or `clock`.
      state: `problem` stops a run or will lose work, `warning` slows it down or may do so later.
      what: one line, with values.
      where: the values around it.
      fix: what to do; empty where all is well.
    """

    name: str
    state: State
    what: str
    where: str = ""
    fix: str = ""
