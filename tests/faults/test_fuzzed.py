"""Run folders with randomly changed values are read or refused, without a traceback."""

import random
from pathlib import Path
from typing import Any

import pytest

import fuzzed
import hostile
from spanax import cli


def test_a_fuzzed_folder_is_read_or_refused(tmp_path: Path) -> None:
    campaign = fuzzed.read_folders(80, 0, tmp_path)
    assert not campaign.failures, str(campaign)
    outcomes = {name.rpartition(", ")[2] for name in campaign.outcomes}
    assert outcomes == {"read", "refused"} and len(campaign.outcomes) > len(fuzzed.READERS)


@pytest.mark.slow
def test_ten_thousand_fuzzed_folders(tmp_path: Path) -> None:
    campaign = fuzzed.read_folders(10_000, 10_000, tmp_path)
    print(campaign)
    assert not campaign.failures, str(campaign)


@pytest.mark.slow
def test_a_fuzzed_run_is_resumed_or_refused(
    devices: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `spanax train` itself, which takes a step more or says why it cannot."""
    monkeypatch.chdir(tmp_path)
    Path("w.py").write_text(hostile.WORKLOAD)
    files, codes = fuzzed.template(), set[Any]()
    for seed in range(60):
        fuzzed.spoil(Path(f"run{seed}"), files, random.Random(seed))
        code: Any = 0
        try:
            cli.main(["train", "--output-dir", f"run{seed}", "--resume", "--steps", "3", "--devices", "1"])
        except SystemExit as stop:
            code = stop.code
        codes.add(code)
        assert code in (0, 2, 65, 73, 78) and "Traceback" not in "".join(capsys.readouterr()), seed
    assert {0, 65} <= codes


def test_the_campaign_detects_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(folder: Path) -> None:
        raise TypeError("a traceback")

    monkeypatch.setattr(fuzzed, "READERS", {"crash": [crash], "steer": [lambda folder: print("\x1b[2J")]})
    campaign = fuzzed.read_folders(2, 0, tmp_path)
    assert len(campaign.failures) == 4 and "TypeError: a traceback" in str(campaign) and "steer" in str(campaign)
