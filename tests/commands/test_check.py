"""`spanax check`: the contract of its answer, its words, and what it refuses."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

import spanax
from requested import with_flags
from spanax import cli
from spanax.check.hlo.collectives import Collective
from spanax.check.report import Buffer, Figures, Report
from spanax.commands.check import CheckCommand, answer
from spanax.commands.plan import answer as plan
from spanax.commands.plan.flags import PlanCommand
from spanax.errors import SpanaxError
from spanax.processes import devices as distributed_devices
from spanax.show.check import collective_text, collectives_text, report_text

SMALL_FLAGS = "--on cpu:8 --global-batch-size 16 --layout fsdp"
SMALL = with_flags(CheckCommand("gpt-nano", "cpu:8"), global_batch_size=16, layout="fsdp", level=2)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANAX_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "checks"))


def ask(**changes: Any) -> tuple[str, dict[str, Any]]:
    reply = answer(with_flags(SMALL, **changes))
    return reply.text, reply.data


def test_the_json_output_has_its_documented_keys() -> None:
    data = json.loads(json.dumps(ask()[1]))
    figures = {"state_bytes", "peak_bytes", "flops", "collectives", "host_bytes"}
    assert {"level", "fits", "predicted", "compiled", "errors", "versions", "seconds"} <= data.keys()
    assert figures == data["predicted"].keys() == data["compiled"].keys()
    assert data["errors"].keys() <= figures and data["level"] == 2 and data["by"].startswith("partitioner")
    for side in ("predicted", "compiled"):
        assert data[side]["collectives"]["fsdp"]["all-gather"] > 0
    reported = sum(collective["bytes"] for collective in data["collectives"] if collective["axes"] == "fsdp")
    assert reported == sum(data["compiled"]["collectives"]["fsdp"].values())


@pytest.mark.parametrize(("share", "value"), [(0.7, None), (0.94, ".96")])
def test_what_a_gpu_needs_beyond_the_default_of_jax(
    share: float, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the text and in the JSON of both commands."""
    flags: dict[str, Any] = {"remat": "none", "attention": "plain", "loss_chunks": "1", "dtype": "float32"}
    need = ask(on="h100:8", level=0, **flags)[1]["upper_bytes"]
    h100 = spanax.cluster("h100:8")
    memory = round(need / share)
    chip = dataclasses.replace(h100.chip, memory_bytes=memory)
    cluster = dataclasses.replace(h100, chip=chip, memory_bytes=memory)
    monkeypatch.setattr("spanax.hardware.cluster.cluster", lambda *_: cluster)
    command = with_flags(PlanCommand("gpt-nano", ("h100:8",)), global_batch_size=16, mesh="fsdp=8", **flags)
    planned = plan.answer(command)
    for text, data in (ask(on="h100:8", level=0, **flags), (planned.text, planned.data["best"])):
        assert data["environment"] == ({} if value is None else {"XLA_PYTHON_CLIENT_MEM_FRACTION": value})
        assert text.count(f"set XLA_PYTHON_CLIENT_MEM_FRACTION={value}, also for ") == (value is not None)


def test_the_text_output(tmp_path: Path) -> None:
    text, _ = ask(collectives=True, explain_collective=1, out=tmp_path / "c.json")
    assert Report.from_json((tmp_path / "c.json").read_text()).layout == "fsdp" and str(tmp_path / "c.json") in text
    parts = ("predicted (plan)", "compiled (partitioner, simulated devices)", "all-gather over fsdp", "nothing has")
    assert [part for part in parts if part not in text] == []
    assert "models/gpt.py:" in text and "blocks.up.kernel" in text
    assert "1. all-gather over fsdp: 8 devices" in text and "line    " in text and ".py:" in text
    assert max(map(len, text.splitlines())) < 200


def test_reports_call_compiled_figures_predictions() -> None:
    reported = Report(
        3, "v5e:2x4", "fsdp", "fsdp=8", True, "the compiler", Figures(4, 8, 2.0, {}), Figures(4, 8, 2.0, {})
    )
    assert "the compiler accepts it and predicts" in report_text(reported)
    assert "will run" not in report_text(reported)


def test_a_program_that_does_not_fit_lists_its_largest_arrays() -> None:
    large = Buffer(2**30, "f32[48,1600]", ("up.kernel", "mu.up.kernel"))
    reported = Report(
        3, "v5e:2x4", "data", "data=8", False, "the compiler", Figures(4, 8), Figures(peak_bytes=20 * 2**30),
        limit_bytes=16 * 2**30, buffers=(large, large),
    )  # fmt: skip
    text = report_text(reported)
    assert "does NOT fit: the compiler needs 20 GiB per device of 16 GiB" in text
    assert "2 x 1 GiB" in text and "shaped like up.kernel, mu.up.kernel" in text


def test_each_collective_has_its_error() -> None:
    predicted = Figures(4, 8, 2.0, {"fsdp": {"all-reduce": 4096, "reduce-scatter": 8}})
    compiled = Figures(4, 8, 2.0, {"fsdp": {"all-reduce": 2048, "all-to-all": 16}})
    text = report_text(Report(3, "v5e:2x4", "fsdp", "fsdp=8", True, "the compiler", predicted, compiled))
    rows = [line.split() for line in text.splitlines() if " over fsdp" in line]
    assert [row[3:] for row in rows] == [
        ["4", "KiB", "2", "KiB", "+100.0", "%"], ["16", "B"], ["8", "B", "only", "predicted"],
    ]  # fmt: skip


def test_equal_collectives_share_a_row() -> None:
    """Unrolled layers have one each; `--explain-collective` takes the number of the first."""
    first, second, other = (
        Collective("all-reduce", "model", "bf16", "bf16[8]", 16, 3, 8, f"all-reduce.{number}", "", f"/a/b/c.py:{line}")
        for number, line in enumerate((7, 7, 9))
    )
    rows = [line.split() for line in collectives_text((first, second, other)).splitlines()[1:]]
    assert rows == [
        ["1", "all-reduce", "model", "bf16[8]", "6", "96", "B", "b/c.py:7"],
        ["3", "all-reduce", "model", "bf16[8]", "3", "48", "B", "b/c.py:9"],
    ]


def test_an_unknown_collective_raises() -> None:
    with pytest.raises(SpanaxError, match="no collective 3"):
        collective_text((), 3)
    assert "--level 2" in collectives_text(())


def test_a_plan_file_is_checked(tmp_path: Path) -> None:

    plan.answer(
        with_flags(PlanCommand("gpt-nano", ("cpu:8",)), global_batch_size=16, layout="fsdp", out=tmp_path / "p.json")
    )
    text, data = ask(layout=None, plan=tmp_path / "p.json", level=0)
    assert data["layout"] in text and data["predicted"]["state_bytes"] > 0


@pytest.mark.parametrize(
    "args, code, output",
    [
        ("", 2, "needs a workload"),
        ("gpt-nano", 2, "needs the devices"),
        ("gpt-nano --on v5e:3x3x3", 2, "a slice of v5e has 2 dims"),
        (f"gpt-nano {SMALL_FLAGS} --level 2 --timeout 0.01 --no-cache", 70, "log"),
    ],
)
def test_a_wrong_request_is_reported(args: str, code: int, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["check", *args.split()])
    assert stop.value.code == code and output in capsys.readouterr().err


def test_findings_are_in_the_output_and_may_be_allowed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from spanax.models.workloads import load\nworkload = load('gpt-nano')\n")
    ask_mine = partial(ask, workload=f"{file}:workload", on="h100:8", level=0, dtype="float32", layout="data")
    text, data = ask_mine()
    (result,) = [finding for finding in data["findings"] if finding["code"] == "SPX017"]
    assert set(result) == {"code", "severity", "path", "message", "fix", "bytes"} and "SPX017 warning:" in text
    file.write_text(file.read_text() + "# spanax: allow SPX017\n")
    assert "SPX017" not in [finding["code"] for finding in ask_mine()[1]["findings"]]
    file.write_text(file.read_text() + "# spanax: allow SPX999\n")
    with pytest.raises(SpanaxError, match="SPX999, but there is no such rule"):
        ask_mine()


def test_a_severe_finding_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    command = "check gpt-nano --on h100:8 --layout data --level 0 --dtype float32 --json".split()
    cli.main([*command, "--fail-on", "error"])
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--fail-on", "warning"])
    assert stopped.value.code == 1
    assert "SPX017" in capsys.readouterr().out


@pytest.mark.slow
def test_parity_is_in_the_output(devices: list[jax.Device]) -> None:
    text, data = ask(parity=True, steps=1, level=0, layers=1)
    assert data["parity"]["passes"] and data["parity"]["loss"] < 1e-5 and "the same numbers" in text


def test_devices_are_simulated_before_a_workloads_file_may_start_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def loaded(**sizes: Any) -> Any:
        done.append("workload")
        raise SpanaxError("enough")

    monkeypatch.setattr(distributed_devices, "simulate", lambda number: done.append("devices"))
    with pytest.raises(SpanaxError, match="enough"):
        answer(dataclasses.replace(SMALL, parity=True), loaded)
    assert done == ["devices", "workload"]
