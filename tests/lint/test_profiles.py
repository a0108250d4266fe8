"""Lint rules on profiles, and where their findings are shown."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lint.cases import profile
from requested import with_flags
from spanax.check.lint.lint import lint_profile
from spanax.check.profile import StepProfile, read_profile
from spanax.commands.check import CheckCommand, answer
from spanax.errors import DataError
from spanax.show.live.events import profile_text


def saved(folder: Path, summary: StepProfile) -> Path:
    (folder / "profile").mkdir(parents=True)
    (folder / "profile" / "summary.json").write_text(json.dumps(asdict(summary)))
    return folder


def test_a_check_reports_the_findings_of_a_profiled_run(tmp_path: Path) -> None:
    asked = with_flags(CheckCommand("gpt-nano", "cpu:8", level=0), global_batch_size=16, layout="fsdp")
    for summary, codes in ((profile(input_wait=0.3), {"SPX019"}), (profile(), set())):
        run = saved(tmp_path / f"run{len(codes)}", summary)
        assert read_profile(run) == summary
        reply = answer(with_flags(asked, profiled=run))
        assert {finding["code"] for finding in reply.data["findings"]} & {"SPX018", "SPX019"} == codes
        assert all(code in reply.text for code in codes)


def test_the_profile_text_ends_with_findings() -> None:
    event = asdict(profile(host=0.4)) | {"out": "runs/a/profile"}
    event["findings"] = [finding.to_json() for finding in lint_profile(profile(host=0.4))]
    assert "SPX018 warning: devices are idle for 80 % of a step of 0.5 s" in profile_text(event)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not a profile summary"),
        ("[]", "not a profile summary"),
        ('{"steps": 1}', "not a profile summary"),
        (json.dumps(asdict(profile()) | {"step_seconds": 0}), "step time is not positive"),
        (json.dumps(asdict(profile()) | {"seconds": {"sleep": 1}}), "not a profile summary"),
    ],
)
def test_a_broken_summary_raises(tmp_path: Path, text: str, message: str) -> None:
    run = saved(tmp_path / "run", profile())
    (run / "profile" / "summary.json").write_text(text)
    with pytest.raises(DataError, match=message) as error:
        read_profile(run)
    assert "summary.json" in str(error.value) and len(str(error.value).splitlines()) <= 4


def test_a_run_without_a_profile_suggests_the_nearest_with_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no profile in") as error:
        read_profile(tmp_path / "runa")
    assert "--profile 10:20" in str(error.value) and error.value.exit_code == 65
    saved(tmp_path / "run-a", profile())
    with pytest.raises(DataError, match="did you mean '.*run-a'"):
        read_profile(tmp_path / "runa")
