"""Report: what the plan says of a step beside what XLA says of it; and the certificate that keeps both."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spanax.check.hlo.collectives import Collective
from spanax.check.hlo.replicated_tensors import ReplicatedTensor
from spanax.displays import display
from spanax.documents import parse_json
from spanax.errors import DataError, WriteError
from spanax.schema import parsed

VERSION = 2

LEVELS = {0: "static", 1: "partitioner, abstract", 2: "partitioner, simulated devices", 3: "compiler"}
"""What produced the compiled figures of each level."""


ADDED = ("version", "errors", "by", "findings", "parity", "plan")
"""What a certificate or `spanax check --json` says beside the fields of a report."""


@dataclass(frozen=True)
class Figures:
    """Bytes and FLOPs of one device in one step; None: this level does not say.

    `collectives` are bytes by mesh axes and kind, results counted: of a gather all that is gathered, of an all-reduce
    the sum, of a reduce-scatter or all-to-all the device's own part.
    """

    state_bytes: int | None = None
    peak_bytes: int | None = None
    flops: float | None = None
    collectives: Mapping[str, Mapping[str, int]] | None = None


@dataclass(frozen=True)
class Buffer:
    """One of the largest arrays of a program that does not fit, and the arrays of the state that have its shape."""

    num_bytes: int
    shapes: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """One check of a plan. The compiler accepts the program and predicts these figures; nothing has run.

    Attributes:
      level: what was asked: 0 static, 1 abstract, 2 simulated devices, 3 the target's own compiler.
      target: the devices.
      layout: the plan's.
      mesh: the plan's.
      fits: whether it fits the devices' memory; None: nobody knows the memory, or the level does not tell.
      fits_by: who says so.
      predicted: the plan's figures.
      compiled: XLA's figures.
      memory: the compiler's own count, by what the bytes are for.
      limit_bytes: what one device may hold.
      collectives: every collective of the compiled program.
      buffers: the largest arrays, where it does not fit.
      replicated: what the partitioner said that it made whole on every device, for want of a better way.
      inputs_only: whether only the state and the batch were split as planned, and all between left to the compiler.
      versions: of everything that had a part in it.
      flags: what the compiler was told beyond its defaults.
      is_whole: whether the compiler went on to machine code.
      program_hash: SHA-256 of the lowered program.
      seconds: how long it took, or took when it was kept.
      is_kept: whether it was read from the cache.

    Example:
      >>> told = Report(3, "v5e:4x4", "fsdp", "fsdp=16", True, "the compiler", Figures(98, 75), Figures(98, 150))
      >>> told.by, told.errors, Report.from_json(told.to_json()) == told
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

    def _repr_html_(self) -> str | None:
        return display(self)

    @property
    def by(self) -> str:
        """What produced the compiled figures."""
        return LEVELS[self.level]

    @property
    def errors(self) -> dict[str, Any]:
        """Predicted over compiled, less 1, by the same keys; collectives by mesh axes, all kinds together."""
        found: dict[str, Any] = {}
        for name in ("state_bytes", "peak_bytes", "flops"):
            ours, theirs = getattr(self.predicted, name), getattr(self.compiled, name)
            if ours is not None and theirs:
                found[name] = ours / theirs - 1
        if self.predicted.collectives is not None and self.compiled.collectives is not None:
            ours, theirs = (_by_axes(one.collectives or {}) for one in (self.predicted, self.compiled))
            found["collectives"] = {
                axes: ours.get(axes, 0) / theirs[axes] - 1 if theirs.get(axes) else None
                for axes in sorted(ours.keys() | theirs.keys())
            }
        return found

    def to_json(self) -> str:
        """The certificate as JSON text; `Report.from_json` reads it back equal."""
        return json.dumps({"version": VERSION, **asdict(self), "errors": self.errors}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Report":
        """The report that `to_json` wrote.

        Raises:
          DataError: the text is no report, or one of another version.
        """
        try:
            return Report.of(parse_json(text))
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError("this is no certificate.", where=str(error)) from None

    @staticmethod
    def of(data: Any) -> "Report":
        """The report in what was read from a certificate, or from what `spanax check --json` printed.

        Raises:
          DataError: it is of another version.
          ValueError: it is no report.
        """
        if not isinstance(data, dict) or "predicted" not in data:
            raise ValueError("it has no prediction")
        if data.get("version", VERSION) != VERSION:
            raise DataError("this certificate is of another version of Spanax.")
        told = {key: value for key, value in data.items() if key not in ADDED}
        moved = [one for one in told.get("collectives") or () if isinstance(one, dict)]
        told["collectives"] = [{key: value for key, value in one.items() if key != "bytes"} for one in moved]
        found = parsed(Report, told)
        if found.level not in LEVELS:
            raise ValueError(f"level = {found.level} is none")
        return found

    def save(self, path: str | Path) -> None:
        """Write the certificate to a file.

        Raises:
          WriteError: it cannot be written.
        """
        try:
            Path(path).write_text(self.to_json())
        except OSError as error:
            raise WriteError(f"cannot write the certificate '{path}'.", where=error.strerror or str(error)) from None

    def kept(self) -> "Report":
        """The same report, as read from the cache."""
        return replace(self, is_kept=True)


def _by_axes(collectives: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {axes: sum(kinds.values()) for axes, kinds in collectives.items()}
