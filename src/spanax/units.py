"""Formatting and parsing of numbers with units."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spanax.errors import FormatError


def bytes_text(num_bytes: float) -> str:
    """Formats a number of bytes in binary units with three digits.

    Example:
      >>> bytes_text(1_610_612_736), bytes_text(512), bytes_text(1_000 * 2**20)
      ('1.5 GiB', '512 B', '1000 MiB')
    """
    return _scaled(float(num_bytes), 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def count_text(count: float) -> str:
    """Formats a count in decimal units with three digits.

    Example:
      >>> count_text(124_439_808), count_text(12)
      ('124 M', '12')
    """
    return _scaled(float(count), 1000, ("", " k", " M", " B", " T"))


def count_of(text: str) -> float:
    """Parses a count, in decimal units if it has one.

    Raises:
      FormatError: the text is no number, or has another unit.

    Example:
      >>> count_of("300B"), count_of("1e12"), count_of("1.5 T"), count_of("2_000")
      (300000000000.0, 1000000000000.0, 1500000000000.0, 2000.0)
    """
    match = re.fullmatch(r"\s*(-?\d[\d_]*\.?\d*(?:[eE][+-]?\d{1,2})?)\s*([kKMBGT]?)\s*", text)
    if match is None:
        raise FormatError(f"{text!r} is not a count.", fix="300B, 1e12 or 1T")
    return float(match[1]) * {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2]]


def whole_number(text: str) -> int | None:
    """Returns a number of at most 18 ASCII digits; None for any other text.

    `str.isdigit` accepts characters that `int` does not, and `int` accepts no more than 4,300 digits.

    Example:
      >>> whole_number("12"), whole_number("²"), whole_number("-1"), whole_number("")
      (12, None, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _scaled(number: float, factor: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(number) < factor:
            return _digits(number) + unit
        number /= factor
    return _digits(number) + units[-1]


def _digits(number: float) -> str:
    """Returns three digits, or all of those before the decimal point."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"


@dataclass(frozen=True)
class Measure:
    """The units of a kind of quantity: unit -> factor, the range of plausible values, and an example."""

    units: Mapping[str, float]
    low: str
    high: str
    example: str


_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}{bit}": factor / 8 for prefix, factor in _DECIMAL.items() for bit in ("b", "bit")}
_OPERATIONS = {f"{prefix}{op}/s": factor for prefix, factor in _DECIMAL.items() for op in ("FLOP", "OP")}

MEASURES: Mapping[str, Measure] = {
    "bytes": Measure(_BYTES, "1 MiB", "10 TiB", "80 GiB"),
    "bytes per second": Measure(
        {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()}, "1 MB/s", "1 PB/s", "300 GB/s or 400 Gb/s"
    ),
    "operations per second": Measure(_OPERATIONS, "1 MFLOP/s", "100 PFLOP/s", "312 TFLOP/s"),
    "seconds": Measure({"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, "1 ns", "1 s", "5 us"),
    "share": Measure({"%": 0.01}, "0.1 %", "200 %", "80.3 %"),
}
"""Kind -> measure. `GB` is 10**9 bytes, `GiB` 2**30 bytes, and `Gb/s` is in bits; FLOP and OP are equivalent."""


def quantity(text: object, kind: str, *, key: str, where: str = "") -> float:
    """Parses a number with a unit into bytes, bytes/s, operations/s, seconds or a fraction.

    Args:
      text: such as `"80 GiB"`.
      kind: a key of MEASURES.
      key: the key of the value, for the error message.
      where: the file or table of the value, for the error message.

    Raises:
      SpanaxError: the unit is missing or of another kind, or the value is not plausible.

    Example:
      >>> quantity("400 Gb/s", "bytes per second", key="rate"), quantity("80 GB", "bytes", key="memory")
      (50000000000.0, 80000000000.0)
      >>> quantity("80", "bytes", key="memory")
      Traceback (most recent call last):
      spanax.errors.FormatError: memory = '80' has no unit. [SPX103]
        fix: memory = "80 GiB"
    """
    measure = MEASURES[kind]
    match = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s]\S*)?\s*", str(text))
    key = key if key.startswith("--") else f"{key} ="
    fix = " or ".join(f'{key} "{example}"' for example in measure.example.split(" or "))
    if isinstance(text, bool | list | dict) or match is None:
        raise FormatError(f"{key} {text!r} is not a number with a unit.", where=where, fix=fix)
    number, unit = match.groups()
    if unit is None:
        raise FormatError(f"{key} {text!r} has no unit.", where=where, fix=fix)
    if unit not in measure.units:
        raise FormatError(f"{key} {text!r}: '{unit}' is not a unit of {kind}.", where=where, fix=fix)
    value = float(number) * measure.units[unit]
    low, high = (_plain(limit, measure) for limit in (measure.low, measure.high))
    if not low <= value <= high:
        raise FormatError(f"{key} {text!r} is not plausible: {measure.low} to {measure.high}.", where=where, fix=fix)
    return value


def quantity_text(value: float, kind: str, digits: int = 4) -> str:
    """Formats a quantity for `quantity`, in decimal units, or binary units for bytes.

    Example:
      >>> quantity_text(2.039e12, "bytes per second"), quantity_text(80 * 2**30, "bytes")
      ('2.039 TB/s', '80 GiB')
    """
    if kind == "share":
        return f"{100 * value:.{digits}g} %"
    units = {
        "bytes": ("B", "KiB", "MiB", "GiB", "TiB"),
        "bytes per second": ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"),
        "operations per second": ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"),
        "seconds": ("ns", "us", "ms", "s"),
    }[kind]
    factors = MEASURES[kind].units
    smaller_units = [unit for unit in units if factors[unit] <= abs(value)]
    unit = smaller_units[-1] if smaller_units else units[0]
    return f"{value / factors[unit]:.{digits}g} {unit}"


def _plain(text: str, measure: Measure) -> float:
    number, unit = text.split()
    return float(number) * measure.units[unit]
