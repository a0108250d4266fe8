"""Defines the result of a check: what was found, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Verdict:
    """The result of one check.

    Attributes:
      name: the subject, such as `disk` or `clock`.
      state: `problem` stops a run or loses work, `warning` slows it down or may do so later.
      what: one line, with values.
      where: further values.
      fix: what to do; empty if all is well.
    """

    name: str
    state: State
    what: str
    where: str = ""
    fix: str = ""
