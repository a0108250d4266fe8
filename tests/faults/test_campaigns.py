"""The quick forms of the campaigns in benchmarks/: kills during a save, and damage over every file of a checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import corruption
from spanax.train.store import manifest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def campaign_summary(*command: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / command[0]), *command[1:], "--json"],
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_kills_during_a_save_lose_nothing() -> None:
    result = campaign_summary("kill_during_save.py", "--kills", "20")
    assert (result["lost"], result["unreadable"], result["stale"]) == (0, 0, 0) and result["newest restored"]
    assert result["killed in a save"] >= 10 and result["acknowledged"] >= 40


def test_damage_anywhere_is_detected_and_the_older_step_used() -> None:
    outcomes = corruption.campaign(130, seed=1)
    assert outcomes["not found"] == [] and outcomes["older step used"] == 130 and outcomes["files"] >= 10


def test_undetected_damage_fails_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "problems", lambda folder: [])
    outcomes = corruption.campaign(5, seed=1)
    assert len(outcomes["not found"]) == 5 and outcomes["older step used"] == 0
