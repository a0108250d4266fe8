"""Rules on a profile, both ways, and where a user sees what they find."""

import json
from pathlib import Path

import pytest

from requested import with_flags
from spanax.check.lint.lint import lint_profile
from spanax.check.measure.profile import StepProfile, read_profile
from spanax.commands.check import CheckCommand, answer
from spanax.errors import DataError
from spanax.show.live.profile import profile_text


def profile(host: float = 0.0, idle: float = 0.0, input_wait: float = 0.0) -> StepProfile:
    return StepProfile(11, 8, 0.5, 0.5 - host - idle - input_wait, 0.0, {}, input_wait, host, idle, {"fusion.1": 0.2})


@pytest.mark.parametrize(
    "seen, codes",
    [
        (profile(host=0.4), ["SPX018"]),
        (profile(host=0.06, idle=0.06), ["SPX018"]),
        (profile(host=0.04, idle=0.04), []),
        (profile(input_wait=0.3), ["SPX019"]),
        (profile(input_wait=0.02), []),
        (profile(host=0.2, input_wait=0.2), ["SPX018", "SPX019"]),
        (profile(), []),
    ],
    ids=["host", "host and idle", "a sixth", "data", "a little data", "both", "busy"],
)
def test_what_waits_is_found(seen: StepProfile, codes: list[str]) -> None:
    found = lint_profile(seen)
    assert [one.code for one in found] == codes
    for one in found:
        assert "0.5 s" in one.message and one.fix and len(str(one).splitlines()) == 2


def kept(folder: Path, seen: StepProfile) -> Path:
    (folder / "profile").mkdir(parents=True)
    (folder / "profile" / "summary.json").write_text(json.dumps(seen.to_json()))
    return folder


def test_a_summary_reads_back_equal(tmp_path: Path) -> None:
    seen = profile(host=0.1, input_wait=0.01)
    assert read_profile(kept(tmp_path / "a", seen)) == seen


def test_a_check_says_what_a_profiled_run_waited_for(tmp_path: Path) -> None:
    asked = with_flags(CheckCommand("gpt-nano", "cpu:8", level=0), batch=16, layout="fsdp")
    for seen, codes in ((profile(input_wait=0.3), {"SPX019"}), (profile(), set())):
        run = kept(tmp_path / f"run{len(codes)}", seen)
        reply = answer(with_flags(asked, profiled=run))
        assert {one["code"] for one in reply.data["findings"]} & {"SPX018", "SPX019"} == codes
        assert all(code in reply.text for code in codes)


def test_the_profile_of_a_run_ends_with_what_is_wrong() -> None:
    event = profile(host=0.4).to_json() | {"out": "runs/a/profile"}
    event["findings"] = [one.to_json() for one in lint_profile(profile(host=0.4))]
    assert "SPX018 warning: 80 % of a step of 0.5 s no operation runs" in profile_text(event)


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "no summary of a profile"),
        ("[]", "no summary of a profile"),
        ('{"steps": 1}', "no summary of a profile"),
        (json.dumps(profile().to_json() | {"step_seconds": 0}), "a step takes no time"),
        (json.dumps(profile().to_json() | {"seconds": {"sleep": 1}}), "no summary of a profile"),
    ],
)
def test_a_broken_summary_is_told(tmp_path: Path, text: str, said: str) -> None:
    run = kept(tmp_path / "run", profile())
    (run / "profile" / "summary.json").write_text(text)
    with pytest.raises(DataError, match=said) as error:
        read_profile(run)
    assert "summary.json" in str(error.value) and len(str(error.value).splitlines()) <= 4


def test_a_run_without_a_profile_is_told_with_the_nearest_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no profile in") as error:
        read_profile(tmp_path / "runa")
    assert "--profile 10:20" in str(error.value) and error.value.exit_code == 65
    kept(tmp_path / "run-a", profile())
    with pytest.raises(DataError, match="did you mean '.*run-a'"):
        read_profile(tmp_path / "runa")
