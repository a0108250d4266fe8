"""A number out of range: the error suggests a usual value, which is valid and never zero."""

from dataclasses import fields, replace

import pytest

from spanax.commands.plan.flags import PlanCommand
from spanax.errors import RangeError
from spanax.train.config import TrainConfig, check
from spanax.train.flags import MAX, MIN, USUAL, check_numbers

ZERO = {"seed", "eval_every"}
"""Settings whose default is 0."""


def suggested(error: RangeError) -> tuple[str, float]:
    """The flag that the `fix` names, and its value."""
    flag, value = str(error).partition("fix: ")[2].split()
    return flag, float(value)


@pytest.mark.parametrize("name", [field.name for field in fields(TrainConfig) if field.name in MIN])
@pytest.mark.parametrize("is_high", [False, True])
def test_a_suggested_setting_is_valid_and_usual(name: str, is_high: bool) -> None:
    kind = float if "." in USUAL.get(name, "") or name in ("learning_rate", "max_grad_norm", "spike_factor") else int
    wrong = MAX.get(name, 10**12) + 1 if is_high else MIN[name] - 1
    # The flags of stages are for a pipeline, and those of samples for each other.
    pipeline = TrainConfig(layout="pipeline", sample_every=200, sample_prompts="prompts.txt")
    with pytest.raises(RangeError, match=r"\[SPX102\]") as caught:
        check(replace(pipeline, **{name: kind(wrong)}))
    flag, value = suggested(caught.value)
    assert flag == f"--{name.replace('_', '-')}"
    check(replace(pipeline, **{name: kind(value)}))
    assert value > 0 or name in ZERO


def test_a_negative_rate_does_not_suggest_zero() -> None:
    with pytest.raises(RangeError, match="fix: --learning-rate 3e-4"):
        check(TrainConfig(learning_rate=-1.0))


def test_a_suggested_number_of_a_question_is_usual() -> None:
    with pytest.raises(RangeError, match="fix: --tokens 300e9"):
        check_numbers(PlanCommand(tokens=-1.0))
