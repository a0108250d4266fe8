"""Lint rules report every mistake of the corpus, and nothing on clean layouts."""

import functools

import pytest

import spanax
from lint.cases import named
from lint.clean import CLEAN, NEAR
from lint.mistakes import MISTAKES
from sampling import sampled
from spanax.check.finding import Finding, Severity, most_severe_first
from spanax.check.lint.lint import PROFILE_RULES, RULES, lint, without_allowed
from spanax.errors import SpanaxError


@functools.cache
def findings_of(name: str) -> list[Finding]:
    """Returns the findings of a case of the corpus, cached."""
    if name in MISTAKES:
        return MISTAKES[name].make()
    return CLEAN[name]() if name in CLEAN else NEAR[name].make()


def is_reported(name: str) -> bool:
    code, about, _ = MISTAKES[name]
    return any(
        finding.code == code and (about in finding.path or about in finding.message) for finding in findings_of(name)
    )


# One of each code; `slow` is all of them.
OF_EACH_CODE = {case.code: name for name, case in MISTAKES.items()} | {
    "SPX005": "one name misspelt", "SPX006": "12 heads over 8", "SPX008": "FSDP across nodes with a small batch",
    "SPX013": "16 layers in a list", "SPX017": "float32 on matrix units",
}  # fmt: skip
NEAR_EACH_CODE = {case.code: name for name, case in reversed(NEAR.items()) if "does not fit" not in name}
FEW_CLEAN = [
    "the best for gpt-nano on cpu:8", "a replicated matrix that fits",
    "an MLP with float32 on a CPU", "half of the memory", "7 layers in a list", "HSDP of Llama 3 8B on two nodes",
]  # fmt: skip


@pytest.mark.parametrize("name", sampled(MISTAKES, OF_EACH_CODE.values()))
def test_a_mistake_is_reported(name: str) -> None:
    assert is_reported(name), findings_of(name)
    for finding in findings_of(name):
        assert finding.message.endswith(".") and "\n" not in finding.message and len(str(finding).splitlines()) <= 4


@pytest.mark.parametrize("name", sampled(CLEAN, FEW_CLEAN))
def test_a_clean_layout_has_no_findings(name: str) -> None:
    assert findings_of(name) == []


@pytest.mark.parametrize("name", sampled(NEAR, NEAR_EACH_CODE.values()))
def test_a_near_miss_has_no_finding(name: str) -> None:
    assert NEAR[name].code not in [finding.code for finding in findings_of(name)], findings_of(name)


FIXES = {"a vocabulary of 50,257 over 4": "vocab 50260", "12 heads over 8": "4 shards", "25 heads over 2": "heads 26"}


@pytest.mark.parametrize("name", sampled(FIXES, ["12 heads over 8"]))
def test_an_indivisible_dim_suggests_the_nearest_divisible_size(name: str) -> None:
    about = MISTAKES[name].about
    fixes = [each.fix for each in findings_of(name) if each.code == "SPX006" and about in each.message]
    assert fixes == [FIXES[name]]


def test_pins_without_a_preset_layout_have_no_alternatives() -> None:
    program, machine = named("dp", "tp"), spanax.cluster("v5e:2x4")
    plan = spanax.plan(program, machine, layout="tensor", pin={"tp": "model"})
    assert not {"SPX009", "SPX010"} & {finding.code for finding in lint(program, plan, machine)}


def test_every_rule_has_a_mistake_a_near_miss_and_an_explanation() -> None:
    rules = (*RULES, *PROFILE_RULES)
    assert len({rule.code for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.find.__doc__ and rule.why.endswith(".")
    codes = {rule.code for rule in rules}
    assert codes == {case.code for case in MISTAKES.values()} == {case.code for case in NEAR.values()}


REPLICATED = Finding("SPX001", Severity.WARNING, "embed", "`embed` is replicated.")
UNROLLED = Finding("SPX013", Severity.INFO, "", "no.")


@pytest.mark.parametrize(
    ("comments", "allow", "expected"),
    [
        ("x = 1  # spanax: allow SPX001 embed\n", [], [UNROLLED]),
        ("# spanax: allow SPX001\n# spanax: allow SPX013", [], []),
        ("# spanax: allow SPX001 head", [], [REPLICATED, UNROLLED]),
        ("", ["SPX001 embed"], [UNROLLED]),
        ("# spanax: allow SPX013", ["SPX001"], []),
        ("", ["SPX001 head"], [REPLICATED, UNROLLED]),
    ],
)
def test_a_comment_or_a_plan_allows_a_finding(comments: str, allow: list[str], expected: list[Finding]) -> None:
    assert without_allowed([REPLICATED, UNROLLED], comments, allow) == expected


@pytest.mark.parametrize("code", ["SPX901", "SPX901 embed", "embed", ""])
def test_an_unknown_code_raises(code: str) -> None:
    with pytest.raises(SpanaxError, match="the plan allows .*, but there is no such rule"):
        without_allowed([], "", [code])
    if code.startswith("SPX"):
        with pytest.raises(SpanaxError, match="a comment allows SPX901, but there is no such rule"):
            without_allowed([], f"# spanax: allow {code}")


def test_the_most_severe_and_largest_come_first() -> None:
    error = Finding("SPX006", Severity.ERROR, "a", "a")
    small, large = (Finding("SPX001", Severity.WARNING, "b", "b", num_bytes=size) for size in (1, 2))
    assert most_severe_first([small, large, error]) == [error, large, small]
