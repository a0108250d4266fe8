"""Finding: one thing that a check has to say, with a code that stays."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import total_ordering
from typing import Any

from spanax.errors import SpanaxError, nearest
from spanax.units import bytes_text

CODE = re.compile(r"SPX\d{3}")


@total_ordering
class Severity(Enum):
    """How much a finding weighs; the gravest first, and `error > warning > info`.

    Example:
      >>> max(Severity.INFO, Severity.ERROR), Severity.of("warning") >= Severity.WARNING
      (<Severity.ERROR: 'error'>, True)
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Severity):
            return NotImplemented
        order = list(Severity)
        return order.index(self) > order.index(other)

    @staticmethod
    def of(name: str) -> "Severity":
        """The severity of a name.

        Raises:
          SpanaxError: there is none of that name.
        """
        names = [one.value for one in Severity]
        if name not in names:
            raise SpanaxError(f"unknown severity '{name}'.", fix=nearest(name, names))
        return Severity(name)


@dataclass(frozen=True)
class Finding:
    """What is wrong, or may be: with which array, how many bytes it is about, and what to do.

    Attributes:
      code: `SPX001` and on; a code never changes its meaning.
      severity: how much it weighs.
      path: the array, axis or flag that it is about; empty where it is about all of it.
      message: one line, with the values.
      fix: the nearest thing that works; empty where nothing does.
      num_bytes: the bytes of one device that it is about; 0 where it is not about bytes.

    Example:
      >>> found = Finding("SPX001", Severity.WARNING, "embed", "`embed` lies whole on 8 devices.", "layout fsdp", 4096)
      >>> print(found)
      SPX001 warning: `embed` lies whole on 8 devices. (4 KiB a device)
        fix: layout fsdp
      >>> list(found.to_json())
      ['code', 'severity', 'path', 'message', 'fix', 'bytes']
    """

    code: str
    severity: Severity
    path: str
    message: str
    fix: str = ""
    num_bytes: int = 0

    def __post_init__(self) -> None:
        if not CODE.fullmatch(self.code):
            raise SpanaxError(f"'{self.code}' is no code of a finding.", fix="SPX001")

    def __str__(self) -> str:
        size = f" ({bytes_text(self.num_bytes)} a device)" if self.num_bytes else ""
        fix = f"\n  fix: {self.fix}" if self.fix else ""
        return f"{self.code} {self.severity.value}: {self.message}{size}{fix}"

    def to_json(self) -> dict[str, Any]:
        """The finding as the contract of `--json` has it."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "path": self.path,
            "message": self.message,
            "fix": self.fix,
            "bytes": self.num_bytes,
        }


def gravest_first(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by severity, then by bytes, then by code and path."""
    order = list(Severity)
    return sorted(findings, key=lambda one: (order.index(one.severity), -one.num_bytes, one.code, one.path))
