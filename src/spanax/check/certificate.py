"""Certificate: a report with what the rules found and the plan that it is about; the file of `spanax check --out`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spanax.check.finding import Finding, Severity
from spanax.check.report import VERSION, Report
from spanax.displays import display
from spanax.documents import parse_json
from spanax.errors import DataError, WriteError
from spanax.plan.plan import Plan
from spanax.schema import parsed


@dataclass(frozen=True)
class Certificate:
    """All that is known of a plan that was checked.

    Attributes:
      report: the plan beside what XLA made of it.
      findings: what the rules say, the gravest first.
      plan: the plan; None where the file does not have it, as what `spanax check --json` prints.

    Example:
      >>> from spanax.check.report import Figures
      >>> report = Report(3, "v5e:4x4", "fsdp", "fsdp=16", True, "the compiler", Figures(98, 75), Figures(98, 150))
      >>> certificate = Certificate(report, (Finding("SPX001", Severity.INFO, "embed", "`embed` is replicated."),))
      >>> Certificate.from_json(certificate.to_json()) == certificate
      True
    """

    report: Report
    findings: tuple[Finding, ...] = ()
    plan: Plan | None = None

    def _repr_html_(self) -> str | None:
        return display(self)

    def to_json(self) -> str:
        """The certificate as JSON text; `Certificate.from_json` reads it back equal, `Report.from_json` its report."""
        told: dict[str, Any] = {"version": VERSION, **asdict(self.report), "errors": self.report.errors}
        told["findings"] = [one.to_json() for one in self.findings]
        if self.plan is not None:
            told["plan"] = json.loads(self.plan.to_json())
        return json.dumps(told, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Certificate":
        """The certificate that `to_json` wrote, or that `spanax check --json` printed.

        Raises:
          DataError: the text is neither, or one of another version.
        """
        try:
            data = parse_json(text)
            report = Report.of(data)
            findings = tuple(_finding(one) for one in data.get("findings", ()))
            plan = Plan.from_json(json.dumps(data["plan"])) if "plan" in data else None
            return Certificate(report, findings, plan)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError("this is no certificate.", where=f"{type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the certificate to a file.

        Raises:
          WriteError: it cannot be written.
        """
        try:
            Path(path).write_text(self.to_json())
        except OSError as error:
            raise WriteError(f"cannot write the certificate '{path}'.", where=error.strerror or str(error)) from None


def _finding(data: Mapping[str, Any]) -> Finding:
    told = {key: value for key, value in data.items() if key not in ("bytes", "severity")}
    return parsed(Finding, told | {"num_bytes": data["bytes"], "severity": Severity.of(data["severity"])})
