"""`spanax plan --calibrate`: before and after, in words and JSON, and the cluster file that stores it."""

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import spanax
from requested import with_flags
from spanax import cli
from spanax.commands.answer import Answer
from spanax.commands.plan.answer import answer
from spanax.commands.plan.flags import PlanCommand
from spanax.errors import SpanaxError, WriteError
from spanax.hardware.cluster import cluster_text
from spanax.models.workloads import load
from spanax.plan.calibration.constants import CONSTANTS, slowed
from spanax.plan.evaluate import evaluate
from spanax.plan.search import search
from spanax.show.search import candidate_json

SMALL = with_flags(
    PlanCommand("gpt-nano", ("cpu:8",)), global_batch_size=16, layout="fsdp", mesh="fsdp=8", remat="none"
)
SLOWER = {constant.name: 1.4 for constant in CONSTANTS}


def compared(path: Path, count: int = 1) -> Path:
    """What `spanax compare --json` prints on a machine whose constants are known."""
    data = measured()
    path.write_text(json.dumps(data | {"rows": data["rows"][:count]}))
    return path


@functools.cache
def measured() -> dict[str, Any]:
    machine = slowed(spanax.cluster("cpu:8"), SLOWER)
    program = load("gpt-nano", batch_size=16).trace(learning_rate=1e-3, num_steps=100)
    result = search(program, machine, remat=("none",), microbatches=1, pipeline=False, top=3)
    rows = [
        candidate_json(result, row) | {"measured": {"seconds": [row.step_seconds] * 10}} for row in result.candidates
    ]
    return {
        "workload": "gpt-nano", "batch": 16, "sequence_lengths": [64], "dtypes": ["float32"], "rows": rows,
        "device_kind": "cpu", "size": "8", "fingerprint": program.fingerprint,
    }  # fmt: skip


@functools.cache
def plain() -> Answer:
    return answer(SMALL)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    path = compared(tmp_path_factory.getbasetemp() / "compared.json")
    return answer(with_flags(SMALL, calibrate=(path,)))


def test_the_contract_of_calibration(calibrated: Answer) -> None:
    data = json.loads(calibrated.to_json())
    calibration, uncalibrated = data["calibration"], plain().data
    assert uncalibrated.keys() == data.keys() - {"calibration"}
    assert calibration.keys() == {
        "applied", "constants", "steps", "mean_error_before", "mean_error_after", "best_before", "best_after",
    }  # fmt: skip
    assert [row["name"] for row in calibration["constants"]][:2] == ["matmul rate, fp32", "memory rate"]
    assert calibration["constants"][1].keys() == {"name", "unit", "before", "after", "uncertainty"}
    assert calibration["steps"][0].keys() == {
        "source", "layout", "num_steps", "measured", "noise", "before", "after", "uncertainty", "transfers",
    }  # fmt: skip
    assert calibration["applied"] and calibration["mean_error_before"] > 0.2 > 0.05 > calibration["mean_error_after"]
    assert calibration["best_before"]["step_seconds"] == uncalibrated["best"]["step_seconds"]
    assert calibration["best_after"]["step_seconds"] == data["best"]["step_seconds"]
    assert data["best"]["step_seconds"] == pytest.approx(1.4 * uncalibrated["best"]["step_seconds"], rel=0.05)


def test_the_text_shows_before_and_after(calibrated: Answer, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = calibrated.text.replace(str(tmp_path_factory.getbasetemp()), "")
    lines = text.splitlines()
    assert lines[0] == "calibrated on /compared.json:"
    assert re.fullmatch(r"constant +before +after +\+-", lines[1])
    assert re.fullmatch(r"matmul rate, fp32 +16.5 GFLOP/s +1\d.\d GFLOP/s +\d+.\d %", lines[2])
    assert re.fullmatch(r"kernel start +800 ns +800 ns +not in these steps", lines[4])
    numbers = r"0.\d+ +0.0 % +0.\d+ +-28.6 % +0.\d+ +[+-][01].\d %"
    assert re.search(rf"\n/compared.json +\S+ on \S+ +{numbers}\n", text)
    assert re.search(r"\nmean error of the predictions: 28.6 % before, [01].\d % after\n", text)
    assert text.index("best before: ") < text.index("best after:  ") < text.index("ranked by step time")


def test_noise_larger_than_the_correction_is_reported(tmp_path: Path) -> None:
    path = compared(tmp_path / "compared.json")
    data = json.loads(path.read_text())
    (row,) = data["rows"]
    seconds = row["measured"]["seconds"][0] / 1.4  # as predicted
    row["measured"]["seconds"] = [seconds * factor for factor in (0.5, 1.6, 0.6, 1.5, 1.05, 1.02, 0.7, 1.4, 0.8, 1.3)]
    path.write_text(json.dumps(data))
    out = tmp_path / "mine.toml"
    reply = answer(with_flags(SMALL, calibrate=(path,), out_cluster=out))
    assert reply.text.startswith("not calibrated: predictions differ from the measured steps by at most ")
    assert reply.data["calibration"]["applied"] is False
    assert reply.data["best"] == reply.data["best"] | {"step_seconds": plain().data["best"]["step_seconds"]}
    assert not out.exists()


def test_the_cluster_file_plans_as_the_calibration_did(tmp_path: Path) -> None:
    path, out = compared(tmp_path / "compared.json", count=3), tmp_path / "mine.toml"
    calibrated = answer(with_flags(SMALL, calibrate=(path,), out_cluster=out))
    assert f"written to {out}: spanax plan gpt-nano --on {out}" in calibrated.text
    again = answer(with_flags(SMALL, on=(str(out),)))
    assert again.data["best"]["step_seconds"] == pytest.approx(calibrated.data["best"]["step_seconds"], rel=1e-4)
    assert "calibrated on" in spanax.cluster(str(out)).chip.sources["memory_bytes_per_second"]
    # Another calibration starts from the file, and has nothing left to correct.
    twice = answer(with_flags(SMALL, on=(str(out),), calibrate=(path,))).data["calibration"]
    assert twice["mean_error_before"] == pytest.approx(calibrated.data["calibration"]["mean_error_after"], abs=0.002)


@pytest.mark.parametrize("name", ["cpu:8", "h100:2x8", "a100-40gb:4", "v5e:16x16:2", "gb200:2x72", "v7:4x4x4"])
def test_a_cluster_file_reads_back(name: str, tmp_path: Path) -> None:
    factors = dict(zip([constant.name for constant in CONSTANTS], (1.1, 0.95, 1.5, 1.3, 0.7, 1.2, 2.0), strict=True))
    machine = slowed(spanax.cluster(name), factors, "calibrated on runs/a, 10 steps")
    (tmp_path / "mine.toml").write_text(cluster_text(machine))
    back = spanax.cluster(str(tmp_path / "mine.toml"))
    assert (back.num_devices, back.shape, back.num_slices) == (machine.num_devices, machine.shape, machine.num_slices)
    for constant in CONSTANTS:
        before, after = constant.value(machine.chip, "bf16"), constant.value(back.chip, "bf16")
        assert after == (None if before is None else pytest.approx(before, rel=1e-5))
    assert {key for key, text in back.chip.sources.items() if text == "calibrated on runs/a, 10 steps"} == {
        key for key, text in machine.chip.sources.items() if text == "calibrated on runs/a, 10 steps"
    }
    assert back.chip.peak_flops.keys() == machine.chip.peak_flops.keys()


def test_invalid_calibration_requests_raise(tmp_path: Path) -> None:
    path = compared(tmp_path / "compared.json")
    with pytest.raises(SpanaxError, match="--solve-for answers one question, without --calibrate"):
        answer(with_flags(SMALL, calibrate=(path,), solve_for="batch"))
    with pytest.raises(SpanaxError, match="--out-cluster needs --calibrate"):
        answer(with_flags(SMALL, out_cluster=tmp_path / "mine.toml"))
    with pytest.raises(SpanaxError, match="which is not h100"):
        answer(with_flags(SMALL, on=("h100:8",), calibrate=(path,)))
    with pytest.raises(WriteError, match="cannot write"):
        answer(with_flags(SMALL, calibrate=(path,), out_cluster=tmp_path / "nowhere" / "mine.toml"))


def test_the_code_of_a_recorded_workload_is_not_executed(tmp_path: Path) -> None:
    path = compared(tmp_path / "compared.json")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    data = json.loads(path.read_text()) | {"workload": f"{tmp_path}/evil.py:main", "fingerprint": "other"}
    path.write_text(json.dumps(data))
    with pytest.raises(SpanaxError, match="measured another program"):
        answer(with_flags(SMALL, calibrate=(path,)))
    assert not (tmp_path / "ran").exists()


def test_the_flag_may_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (compared(tmp_path / f"{name}.json") for name in "ab")
    args = "plan gpt-nano --on cpu:8 --global-batch-size 16 --layout fsdp --mesh fsdp=8 --remat none --json".split()
    cli.main([*args, "--calibrate", str(first), "--calibrate", str(second)])
    steps = json.loads(capsys.readouterr().out)["calibration"]["steps"]
    assert [step["source"] for step in steps] == [str(first), str(second)]


@pytest.mark.slow
def test_a_run_of_twelve_steps_calibrates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a busy machine, steps may be too noisy to change the constants, which the output then states."""
    folder = tmp_path / "run"
    args = f"train gpt-nano --global-batch-size 16 --steps 12 --save-every 0 --output-dir {folder}"
    cli.main(args.split())
    capsys.readouterr()
    data: dict[str, Any] = answer(with_flags(SMALL, calibrate=(folder,))).data["calibration"]
    (step,) = data["steps"]
    assert step["num_steps"] == 10 and step["measured"] > 0 and step["transfers"] == []
    plan = spanax.Plan.of_run(folder)
    program = load("gpt-nano", batch_size=16).trace(learning_rate=1e-3, num_steps=12)
    predicted = evaluate(program, plan, spanax.cluster("cpu:8")).candidate.step_seconds
    assert step["before"] == pytest.approx(predicted)
    assert data["applied"] == (abs(math.log(step["before"] / step["measured"])) > step["noise"])
    assert data["mean_error_after"] < max(0.05, 2 * step["noise"])
