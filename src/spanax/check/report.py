"""Reports of `spanax.check`: predicted and compiled figures of a step, and the certificate that has them as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spanax.check.finding import Finding
from spanax.check.hlo.collectives import Collective
from spanax.check.hlo.replicated_tensors import ReplicatedTensor
from spanax.displays import display
from spanax.documents import parse_json
from spanax.entries.local_path import local_path
from spanax.errors import DataError, FileError, FileErrors, WriteError
from spanax.plan.plan import Plan
from spanax.schema import parsed
from spanax.sealed import VersionError, check_version

VERSION = 2

LEVELS = {0: "static", 1: "partitioner, abstract", 2: "partitioner, simulated devices", 3: "compiler"}
"""The source of the compiled figures of each level."""


ADDED = ("version", "errors", "by", "findings", "parity", "plan", "environment")
"""The keys of a certificate, or of the output of `spanax check --json`, that are not fields of a report."""


@dataclass(frozen=True)
class Figures:
    """Bytes and FLOPs per device and step; None for figures that a level does not provide.

    `collectives` has the bytes of the results by mesh axes and kind: the gathered array of an all-gather, the sum of an
    all-reduce, the local shard of a reduce-scatter or all-to-all. `state_bytes` is the state in device memory,
    `host_bytes` the state in host memory.
    """

    state_bytes: int | None = None
    peak_bytes: int | None = None
    flops: float | None = None
    collectives: Mapping[str, Mapping[str, int]] | None = None
    host_bytes: int | None = None


@dataclass(frozen=True)
class Buffer:
    """One of the largest buffers of a program that does not fit, and the paths of the state arrays with its shape."""

    num_bytes: int
    shapes: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The result of checking a plan. The compiler accepts the program and predicts these figures; nothing has run.

    Attributes:
      level: 0 static, 1 abstract mesh, 2 simulated devices, 3 the target's compiler.
      target: the devices.
      layout: the layout of the plan.
      mesh: the mesh of the plan.
      fits: whether the step fits in the memory of the devices; None if unknown.
      fits_by: the source of `fits`.
      predicted: the plan's figures.
      compiled: XLA's figures.
      memory: the compiler's memory statistics, in bytes.
      limit_bytes: the memory of one device.
      upper_bytes: the upper estimate of the predicted peak, by which the plan fits or not.
      collectives: every collective of the compiled program.
      buffers: the largest buffers, if the step does not fit.
      replicated: the tensors that the partitioner logged as replicated because it could not reshard them.
      inputs_only: whether only the state and the batch have the planned shardings.
      versions: versions of the packages and of the compiler.
      flags: compiler options in addition to its defaults.
      is_whole: whether the compiler generated machine code.
      program_hash: SHA-256 of the lowered program.
      seconds: duration of the check; of the original check if the report is cached.
      is_kept: whether the report was read from the cache.
      findings: the findings of the lint rules, most severe first; only in the certificate of `spanax check`.
      plan: the plan; only in that certificate.

    Example:
      >>> report = Report(3, "v5e:4x4", "fsdp", "fsdp=16", True, "the compiler", Figures(98, 75), Figures(98, 150))
      >>> report.by, report.errors, Report.from_json(report.to_json()) == report
      ('compiler', {'state_bytes': 0.0, 'peak_bytes': -0.5}, True)
    """

    level: int
    target: str
    layout: str
    mesh: str
    fits: bool | None
    fits_by: str
    predicted: Figures
    compiled: Figures
    memory: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: int | None = None
    upper_bytes: int | None = None
    collectives: tuple[Collective, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    replicated: tuple[ReplicatedTensor, ...] = ()
    inputs_only: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = False
    program_hash: str = ""
    seconds: float = 0.0
    is_kept: bool = False
    findings: tuple[Finding, ...] = ()
    plan: Plan | None = None

    def _repr_html_(self) -> str:
        return display(self)

    @property
    def by(self) -> str:
        """The source of the compiled figures."""
        return LEVELS[self.level]

    @property
    def errors(self) -> dict[str, Any]:
        """Relative errors, predicted / compiled - 1, by figure; collectives by mesh axes, summed over kinds."""
        errors: dict[str, Any] = {}
        for name in ("state_bytes", "host_bytes", "peak_bytes", "flops"):
            predicted = getattr(self.predicted, name)
            compiled = getattr(self.compiled, name)
            if predicted is not None and compiled:
                errors[name] = predicted / compiled - 1
        if self.predicted.collectives is not None and self.compiled.collectives is not None:
            predicted, compiled = (_by_axes(figures.collectives or {}) for figures in (self.predicted, self.compiled))
            errors["collectives"] = {
                axes: predicted.get(axes, 0) / compiled[axes] - 1 if compiled.get(axes) else None
                for axes in sorted(predicted.keys() | compiled.keys())
            }
        return errors

    def to_json(self) -> str:
        """Returns the report as JSON text, which `Report.from_json` parses."""
        data = {"version": VERSION, **plain_fields(self), "errors": self.errors}
        for figures in (data["predicted"], data["compiled"]):
            if figures["host_bytes"] is None:
                del figures["host_bytes"]
        data["findings"] = [finding.to_json() for finding in self.findings]
        if self.plan is not None:
            data["plan"] = json.loads(self.plan.to_json())
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Report":
        """Parses the JSON text of `to_json`, or the output of `spanax check --json`.

        Raises:
          DataError: the text is neither, or has another version.
        """
        try:
            return Report._of(parse_json(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise FileError("this is not a certificate.", where=f"{type(error).__name__}: {error}") from None

    @staticmethod
    def _of(data: Any) -> "Report":
        if not isinstance(data, dict) or "predicted" not in data:
            raise ValueError("it has no 'predicted' figures")
        try:
            check_version(data.get("version", VERSION), VERSION)
        except VersionError as error:
            raise FileError("cannot read the certificate.", where=str(error), fix=error.fix) from None
        fields = {key: value for key, value in data.items() if key not in ADDED}
        collectives = [entry for entry in fields.get("collectives") or () if isinstance(entry, dict)]
        fields["collectives"] = [
            {key: value for key, value in entry.items() if key != "bytes"} for entry in collectives
        ]
        report = parsed(Report, fields)
        if report.level not in LEVELS:
            raise ValueError(f"level = {report.level} is unknown")
        findings = tuple(map(Finding.from_json, data.get("findings", ())))
        plan = Plan.from_json(json.dumps(data["plan"])) if "plan" in data else None
        return replace(report, findings=findings, plan=plan)

    def save(self, path: str | Path) -> None:
        """Writes the report to a file.

        Raises:
          WriteError: it cannot be written.
        """
        with FileErrors(WriteError, f"cannot write the certificate '{path}'."):
            local_path(path).write_text(self.to_json())


def _by_axes(collectives: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {axes: sum(kinds.values()) for axes, kinds in collectives.items()}


def plain_fields(report: Report) -> dict[str, Any]:
    """Returns the fields of a report as plain values, without findings and plan."""
    fields = asdict(replace(report, findings=(), plan=None))
    return {name: value for name, value in fields.items() if name not in ("findings", "plan")}
