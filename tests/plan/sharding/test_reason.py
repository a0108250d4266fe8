"""Reasons: every code renders."""

import pytest

from spanax.plan.reason import Code, Reason


@pytest.mark.parametrize("code", Code)
def test_every_code_renders_with_the_fields_of_a_reason(code: Code) -> None:
    text = str(Reason(code, "mlp", "fsdp+model", 10, 4, "4 MiB"))
    assert text and "{" not in text


def test_reasons_are_equal_by_value() -> None:
    first, second = (Reason(Code.NOT_DIVISIBLE, "mlp", size=10, num_shards=shards) for shards in (4, 8))
    assert first == Reason(Code.NOT_DIVISIBLE, "mlp", size=10, num_shards=4) and first != second
    assert len({first, second}) == 2 and str(second) == "mlp (10) is not divisible by 8"
