"""Plans, checkpoints, run folders and certificates written by earlier commits load, and give the same numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import spanax
from sampling import sampled
from spanax import cli
from spanax.check.certificate import Certificate

WRITTEN = Path(__file__).parent / "data" / "version_1"
"""Files of version 1, with the workload that they belong to."""

LOSSES = {1: 4.1893, 2: 4.1775, 3: 4.1479, 4: 4.1897}
"""By step, as the commit that wrote the files logged them."""

PLANS = sorted(path.stem for path in WRITTEN.glob("plan_*.json"))


def losses(run: str) -> dict[int, Any]:
    records = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return {record["step"]: pytest.approx(record["loss"], abs=1e-4) for record in records if "loss" in record}


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    shutil.copytree(WRITTEN, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", PLANS)
def test_an_old_plan_has_the_same_values(name: str) -> None:
    text = (WRITTEN / f"{name}.json").read_text()
    values = json.loads(spanax.Plan.from_json(text).to_json())
    old = json.loads(text)
    assert {key: values[key] for key in old} == old


TRAINED = [name for name in PLANS if name != "plan_searched"]  # that one is for H100s


@pytest.mark.parametrize("name", sampled(TRAINED, ["plan_accumulation"]))
def test_an_old_plan_trains(name: str, in_folder: Path) -> None:
    cli.main(["train", "workload.py:tiny", "--plan", f"{name}.json", "--devices", "4", "--steps", "4", "--out", "new"])
    assert losses("new") == LOSSES


@pytest.mark.parametrize("layout", sampled(["fsdp", "tensor"], ["tensor"]))
def test_an_old_run_resumes(layout: str, in_folder: Path) -> None:
    cli.main(["train", "--output-dir", "run", "--resume", "--layout", layout, "--devices", "4", "--steps", "4"])
    assert losses("run") == LOSSES


def test_an_old_run_is_verified_and_reported(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["checkpoint", "verify", "run", "--json"])
    assert json.loads(capsys.readouterr().out)["problems"] == []
    cli.main(["report", "run", "--json"])
    assert json.loads(capsys.readouterr().out)["reached"] == 2


def test_an_old_certificate_has_the_same_values(in_folder: Path) -> None:
    text = Path("certificate.json").read_text()
    old, written = json.loads(text), json.loads(Certificate.from_json(text).to_json())
    assert {name: written[name] for name in old} == old
    cli.main(["report", "certificate.json", "--out", "page.html"])
    assert "fsdp" in Path("page.html").read_text()
