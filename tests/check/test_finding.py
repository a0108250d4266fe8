"""Findings have fixed JSON keys, ordered severities, and well-formed codes."""

import pytest

from spanax.check.finding import Finding, Severity, most_severe_first
from spanax.errors import SpanaxError

REPLICATED = Finding("SPX001", Severity.WARNING, "embed", "`embed` is replicated.", "layout fsdp", 4096)


def test_the_keys_of_a_finding() -> None:
    assert REPLICATED.to_json() == {
        "code": "SPX001",
        "severity": "warning",
        "path": "embed",
        "message": "`embed` is replicated.",
        "fix": "layout fsdp",
        "bytes": 4096,
    }


def test_severities_are_ordered() -> None:
    assert Severity.ERROR > Severity.WARNING > Severity.INFO
    assert [severity for severity in Severity if severity >= Severity.of("warning")] == [
        Severity.ERROR,
        Severity.WARNING,
    ]


def test_an_unknown_severity_raises() -> None:
    with pytest.raises(SpanaxError, match="did you mean 'warning'"):
        Severity.of("warn")


def test_a_malformed_code_raises() -> None:
    with pytest.raises(SpanaxError, match="'SP1' is not the code"):
        Finding("SP1", Severity.INFO, "", "")


def test_the_most_severe_and_largest_come_first() -> None:
    error = Finding("SPX006", Severity.ERROR, "a", "a")
    small = Finding("SPX001", Severity.WARNING, "b", "b", num_bytes=1)
    assert most_severe_first([small, REPLICATED, error]) == [error, REPLICATED, small]


def test_a_finding_without_bytes_and_fix_is_one_line() -> None:
    assert str(Finding("SPX018", Severity.INFO, "", "the host is busy")) == "SPX018 info: the host is busy"
