"""Findings of a check: a permanent code, a severity, a message and a fix."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import total_ordering
from typing import Any

from spanax.schema import parsed
from spanax.units import bytes_text


@total_ordering
class Severity(Enum):
    """The severity of a finding: `error > warning > info`; iteration starts with the most severe.

    Example:
      >>> max(Severity.INFO, Severity.ERROR), Severity("warning") >= Severity.WARNING
      (<Severity.ERROR: 'error'>, True)
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    def __lt__(self, other: "Severity") -> bool:
        order = list(Severity)
        return order.index(self) > order.index(other)


@dataclass(frozen=True)
class Finding:
    """A problem, or a possible problem, of a plan.

    Attributes:
      code: a code such as `SPX001`, whose meaning never changes.
      severity: how severe the problem is.
      path: the array, axis or flag; empty for the plan as a whole.
      message: one line, with the values.
      fix: the nearest change that resolves it; empty if there is none.
      num_bytes: the bytes per device concerned, or 0.

    Example:
      >>> message = "`embed` is replicated on 8 devices."
      >>> finding = Finding("SPX001", Severity.WARNING, "embed", message, "layout fsdp", 4096)
      >>> print(finding)
      SPX001 warning: `embed` is replicated on 8 devices. (4 KiB per device)
        fix: layout fsdp
      >>> list(finding.to_json())
      ['code', 'severity', 'path', 'message', 'fix', 'bytes']
    """

    code: str
    severity: Severity
    path: str
    message: str
    fix: str = ""
    num_bytes: int = 0

    def __str__(self) -> str:
        size = f" ({bytes_text(self.num_bytes)} per device)" if self.num_bytes else ""
        fix = f"\n  fix: {self.fix}" if self.fix else ""
        return f"{self.code} {self.severity.value}: {self.message}{size}{fix}"

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as an entry of `findings` in the output of `--json`."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "path": self.path,
            "message": self.message,
            "fix": self.fix,
            "bytes": self.num_bytes,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Finding":
        """Parses an entry of `to_json`."""
        fields = {key: value for key, value in data.items() if key not in ("bytes", "severity")}
        return parsed(Finding, fields | {"num_bytes": data["bytes"], "severity": Severity(data["severity"])})


def most_severe_first(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings sorted by severity, then by bytes, code and path."""
    order = list(Severity)
    return sorted(findings, key=lambda entry: (order.index(entry.severity), -entry.num_bytes, entry.code, entry.path))
