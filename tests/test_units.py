"""Quantities: every number that is read has a unit and a plausible value."""

import pytest

from spanax.errors import SpanaxError
from spanax.units import MEASURES, quantity, quantity_text


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("80 GB", "bytes", 80e9),
        ("1.5e2 MiB", "bytes", 150 * 2**20),
        ("300 GB/s", "bytes per second", 300e9),
        ("400 Gb/s", "bytes per second", 50e9),
        ("90 GiB/s", "bytes per second", 90 * 2**30),
        ("312 TFLOP/s", "operations per second", 312e12),
        ("624 TOP/s", "operations per second", 624e12),
        ("5 us", "seconds", 5e-6),
        ("80.3 %", "share", 0.803),
    ],
)
def test_a_quantity_is_parsed(text: str, kind: str, value: float) -> None:
    assert quantity(text, kind, key="x") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("80", "bytes", "has no unit"),
        (True, "bytes", "is not a number with a unit"),
        ("", "bytes", "is not a number with a unit"),
        (["80 GiB"], "bytes", "is not a number with a unit"),
        ("nan GiB", "bytes", "is not a number with a unit"),
        ("80 Gb", "bytes", "'Gb' is not a unit of bytes"),
        ("80 GB", "bytes per second", "'GB' is not a unit"),
        ("300 GB/s", "operations per second", "'GB/s' is not a unit"),
        ("312 TFLOPS", "operations per second", "'TFLOPS' is not a unit"),
        ("5 µs", "seconds", "'µs' is not a unit"),
        ("0 GiB", "bytes", "is not plausible"),
        ("-80 GiB", "bytes", "is not plausible"),
        ("80 TiB", "bytes", "is not plausible"),
        ("2 s", "seconds", "is not plausible"),
        ("900 %", "share", "is not plausible"),
    ],
)
def test_an_invalid_value_raises(text: object, kind: str, reason: str) -> None:
    with pytest.raises(SpanaxError) as caught:
        quantity(text, kind, key="inside.rate", where="mine.toml")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"inside.rate = {text!r}") and reason in lines[0]
    assert lines[1:] == ["  where: mine.toml", lines[2]] and lines[2].startswith("  fix: inside.rate = ")


@pytest.mark.parametrize("kind", MEASURES)
def test_the_examples_and_limits_of_units_parse(kind: str) -> None:
    measure = MEASURES[kind]
    for text in (measure.low, measure.high, *measure.example.split(" or ")):
        assert quantity(text, kind, key="x") > 0


@pytest.mark.parametrize(
    ("value", "kind"),
    [(80 * 2**30, "bytes"), (2.039e12, "bytes per second"), (989e12, "operations per second"), (3.4e-6, "seconds")],
)
def test_a_written_quantity_reads_back(value: float, kind: str) -> None:
    assert quantity(quantity_text(value, kind), kind, key="x") == pytest.approx(value, rel=1e-3)
    assert quantity(quantity_text(0.869, "share"), "share", key="x") == pytest.approx(0.869)
