"""The dataclass that lint rules yield for each problem."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """A problem that a rule reports, without the code and severity of the rule.

    Attributes:
      path: the array or mesh axis; empty for the plan as a whole.
      message: one sentence with the values.
      fix: the nearest change that resolves it, or empty.
      num_bytes: the bytes per device concerned, or 0.
      is_error: whether the problem is an error although its rule is only a warning.
    """

    path: str
    message: str
    fix: str = ""
    num_bytes: int = 0
    is_error: bool = False
