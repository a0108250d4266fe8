"""Finding: the contract's keys, the order of severities, and codes that are codes."""

import pytest

from spanax.check.finding import Finding, Severity, gravest_first
from spanax.errors import SpanaxError

LEFT_WHOLE = Finding("SPX001", Severity.WARNING, "embed", "`embed` lies whole.", "layout fsdp", 4096)


def test_the_contract() -> None:
    assert LEFT_WHOLE.to_json() == {
        "code": "SPX001",
        "severity": "warning",
        "path": "embed",
        "message": "`embed` lies whole.",
        "fix": "layout fsdp",
        "bytes": 4096,
    }


def test_severities_are_ordered() -> None:
    assert Severity.ERROR > Severity.WARNING > Severity.INFO
    assert [one for one in Severity if one >= Severity.of("warning")] == [Severity.ERROR, Severity.WARNING]


def test_an_unknown_severity_is_told() -> None:
    with pytest.raises(SpanaxError, match="did you mean 'warning'"):
        Severity.of("warn")


def test_a_code_is_a_code() -> None:
    with pytest.raises(SpanaxError, match="'SP1' is no code"):
        Finding("SP1", Severity.INFO, "", "")


def test_the_gravest_and_largest_come_first() -> None:
    error = Finding("SPX006", Severity.ERROR, "a", "a")
    small = Finding("SPX001", Severity.WARNING, "b", "b", num_bytes=1)
    assert gravest_first([small, LEFT_WHOLE, error]) == [error, LEFT_WHOLE, small]


def test_what_has_no_bytes_and_no_fix_is_one_line() -> None:
    assert str(Finding("SPX018", Severity.INFO, "", "the host is busy")) == "SPX018 info: the host is busy"
