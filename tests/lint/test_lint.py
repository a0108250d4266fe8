"""Lint: mistakes are found by their code, and layouts without one are left alone."""

import functools
import os
from pathlib import Path

import pytest

import spanax
from lint.clean import CLEAN, NEAR
from lint.made import model, named
from lint.mistakes import MISTAKES
from spanax.check.finding import Finding, Severity
from spanax.check.lint.lint import PROFILE_RULES, RULES, lint, rules_page, waived
from spanax.errors import SpanaxError

LEAST_RECALL = 0.95


@functools.cache
def said(name: str) -> list[Finding]:
    """What is said of a case of the corpus, worked out once."""
    if name in MISTAKES:
        return MISTAKES[name].make()
    return CLEAN[name]() if name in CLEAN else NEAR[name].make()


def is_found(name: str) -> bool:
    code, about, _ = MISTAKES[name]
    return any(one.code == code and (about in one.path or about in one.message) for one in said(name))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    assert is_found(name), said(name)
    for one in said(name):
        assert one.message.endswith(".") and "\n" not in one.message and len(str(one).splitlines()) <= 4


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_said_of_what_is_right(name: str) -> None:
    assert said(name) == []


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_is_none(name: str) -> None:
    assert NEAR[name].code not in [one.code for one in said(name)], said(name)


def test_recall_and_false_alarms(capsys: pytest.CaptureFixture[str]) -> None:
    found = [name for name in MISTAKES if is_found(name)]
    alarms = [name for name in CLEAN if said(name)]
    alarms += [name for name in NEAR if NEAR[name].code in [one.code for one in said(name)]]
    recall = len(found) / len(MISTAKES)
    with capsys.disabled():
        print(f"\nlint: {len(found)} of {len(MISTAKES)} mistakes found ({100 * recall:.1f} %), {len(alarms)} false "
              f"alarms of {len(CLEAN)} clean layouts and {len(NEAR)} near misses")  # fmt: skip
    assert len(MISTAKES) >= 40 and len(CLEAN) >= 15
    assert recall >= LEAST_RECALL and not alarms, (set(MISTAKES) - set(found), alarms)


@pytest.mark.parametrize(
    "name, fix",
    [
        ("a vocabulary of 50,257 over 4", "vocab 50260"),
        ("12 heads over 8", "4 ways"),
        ("25 heads over 2", "heads 26"),
        ("8 keys and values over 16", "8 ways"),
    ],
)
def test_what_does_not_divide_is_told_with_the_nearest_that_does(name: str, fix: str) -> None:
    about = MISTAKES[name].about
    assert [one.fix for one in said(name) if one.code == "SPX006" and about in one.message] == [fix]


REFUSED = {
    "a batch that does not divide": (
        ("gpt2", 12), "a100:8", {"layout": "fsdp"}, "'batch' of size 12 does not divide 8",
    ),
    "8 experts over 16": (
        ("moe-nano", 64), "h100:2x8", {"layout": "expert", "mesh": "data=1,expert=16"}, "has nothing to shard",
    ),
    "63 tokens over 16": (
        ("gpt-nano", 64, 63), "a100:2x8", {"layout": "context", "mesh": "data=1,context=16"}, "has nothing to shard",
    ),
    "a pin of an axis that is not there": (
        ("gpt2", 64), "a100:8", {"layout": "fsdp", "pin": {"mpl": "fsdp"}}, "cannot pin axis 'mpl'",
    ),
    "a mesh of too few devices": (("gpt2", 64), "a100:8", {"mesh": "fsdp=4"}, "takes 4 devices"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_laid_out_is_refused_before_it_is_checked(name: str) -> None:
    (workload, batch, *seq), on, how, message = REFUSED[name]
    program = model(workload, batch, **({"seq_len": seq[0]} if seq else {}))
    with pytest.raises(SpanaxError, match=message):
        spanax.plan(program, spanax.cluster(on), **how)


def test_pins_that_no_layout_with_a_name_keeps_leave_nothing_to_compare_with() -> None:
    program, machine = named("dp", "tp"), spanax.cluster("v5e:2x4")
    plan = spanax.plan(program, machine, layout="tensor", pin={"tp": "model"})
    assert not {"SPX009", "SPX010"} & {one.code for one in lint(program, plan, machine)}


def test_every_rule_is_seeded_both_ways_and_explained() -> None:
    rules = (*RULES, *PROFILE_RULES)
    assert len({rule.code for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.find.__doc__ and rule.why.endswith(".")
    codes = {rule.code for rule in rules}
    assert codes == {one.code for one in MISTAKES.values()} == {one.code for one in NEAR.values()}


def test_a_comment_allows_one() -> None:
    found = [
        Finding("SPX001", Severity.WARNING, "embed", "it lies whole."),
        Finding("SPX013", Severity.INFO, "", "no."),
    ]
    assert [one.code for one in waived(found, "x = 1  # spanax: allow SPX001 embed\n")] == ["SPX013"]
    assert waived(found, "# spanax: allow SPX001\n# spanax: allow SPX013") == []
    assert waived(found, "# spanax: allow SPX001 head") == found
    with pytest.raises(SpanaxError, match="a comment allows SPX901, and there is no such rule"):
        waived(found, "# spanax: allow SPX901")


def test_a_plan_allows_the_same() -> None:
    found = [
        Finding("SPX001", Severity.WARNING, "embed", "it lies whole."),
        Finding("SPX013", Severity.INFO, "", "no."),
    ]
    assert [one.code for one in waived(found, "", ["SPX001 embed"])] == ["SPX013"]
    assert waived(found, "# spanax: allow SPX013", ["SPX001"]) == []
    assert waived(found, "", ["SPX001 head"]) == found
    for unknown in ("SPX901", "SPX901 embed", "embed", ""):
        with pytest.raises(SpanaxError, match="the plan allows .*, and there is no such rule"):
            waived(found, "", [unknown])


def test_the_page_is_that_of_the_rules() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "lint.md"
    if os.environ.get("SPANAX_GOLDEN") == "update":
        page.write_text(rules_page())
    assert page.read_text() == rules_page()
