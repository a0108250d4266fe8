"""Run folders with values changed at random: whatever they say, it is read or refused, and never a traceback."""

from pathlib import Path

import pytest

import fuzzed


def test_a_fuzzed_folder_is_read_or_refused(tmp_path: Path) -> None:
    campaign = fuzzed.read_folders(30, 0, tmp_path)
    assert not campaign.failures, str(campaign)
    outcomes = {name.rpartition(", ")[2] for name in campaign.outcomes}
    assert outcomes == {"read", "refused"} and len(campaign.outcomes) > len(fuzzed.READERS)


@pytest.mark.slow
def test_ten_thousand_fuzzed_folders(tmp_path: Path) -> None:
    campaign = fuzzed.read_folders(10_000, 10_000, tmp_path)
    print(campaign)
    assert not campaign.failures, str(campaign)


def test_the_campaign_sees_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(folder: Path) -> None:
        raise TypeError("a traceback")

    monkeypatch.setattr(fuzzed, "READERS", {"crash": [crash], "steer": [lambda folder: print("\x1b[2J")]})
    campaign = fuzzed.read_folders(2, 0, tmp_path)
    assert len(campaign.failures) == 4 and "TypeError: a traceback" in str(campaign) and "steer" in str(campaign)
