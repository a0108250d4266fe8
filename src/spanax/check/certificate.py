"""The certificate of a check: its report, lint findings and plan, as written by `spanax check --out`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanax.check.finding import Finding, Severity
from spanax.check.report import Report, write_certificate
from spanax.displays import display
from spanax.documents import parse_json
from spanax.errors import DataError, FileError
from spanax.plan.plan import Plan
from spanax.schema import parsed


@dataclass(frozen=True)
class Certificate:
    """The results of checking a plan.

    Attributes:
      report: the predicted and compiled figures.
      findings: the findings of the lint rules, most severe first.
      plan: the plan; None if the file lacks it, as the output of `spanax check --json` does.

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

    def _repr_html_(self) -> str:
        return display(self)

    def to_json(self) -> str:
        """Returns the certificate as JSON text, which `Certificate.from_json` and `Report.from_json` parse."""
        fields = json.loads(self.report.to_json()) | {"findings": [finding.to_json() for finding in self.findings]}
        if self.plan is not None:
            fields["plan"] = json.loads(self.plan.to_json())
        return json.dumps(fields, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Certificate":
        """Parses the JSON text of `to_json`, or the output of `spanax check --json`.

        Raises:
          DataError: the text is neither, or has another version.
        """
        try:
            data = parse_json(text)
            report = Report.of(data)
            findings = tuple(_finding(entry) for entry in data.get("findings", ()))
            plan = Plan.from_json(json.dumps(data["plan"])) if "plan" in data else None
            return Certificate(report, findings, plan)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise FileError("this is not a certificate.", where=f"{type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes the certificate to a file.

        Raises:
          WriteError: it cannot be written.
        """
        write_certificate(path, self.to_json())


def _finding(data: Mapping[str, Any]) -> Finding:
    fields = {key: value for key, value in data.items() if key not in ("bytes", "severity")}
    return parsed(Finding, fields | {"num_bytes": data["bytes"], "severity": Severity.of(data["severity"])})
