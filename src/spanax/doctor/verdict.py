"""Defines the result of a check of the machine."""

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
      where: additional values.
      fix: the change that resolves a problem or warning; empty otherwise.
    """

    name: str
    state: State
    what: str
    where: str = ""
    fix: str = ""
