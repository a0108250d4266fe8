"""Measured steps in run folders and comparisons: what is read of them, and what is refused."""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import spanax
from programs import zoo_program
from spanax.check.measure.compare import layouts
from spanax.check.measure.measured_runs import Requested, measured_steps
from spanax.entries.names import ENVIRONMENT, METRICS
from spanax.errors import DataError, EntryError, SpanaxError
from spanax.models.workloads import load
from spanax.plan.calibration.measured import MeasuredStep
from spanax.show.search import candidate_json
from spanax.train.config import TrainConfig
from spanax.train.record.folder import read_environment, write_records
from spanax.train.record.metric_curves import metric_curves


@dataclasses.dataclass(frozen=True)
class Device:
    """What the record of a run reads of a device."""

    device_kind: str = "cpu"


def no_load(name: str, **sizes: int) -> Any:
    raise SpanaxError(f"'{name}' may not be loaded.")


def requested(on: str = "cpu:8", name: str = "gpt") -> Requested:
    return Requested(zoo_program(name), spanax.cluster(on), no_load)


def started(step: int = 0) -> dict[str, Any]:
    return {"event": "start", "step": step}


def steps(seconds: Sequence[float], first: int = 1) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": step, "loss": 1.0, "step_seconds": value, "data_wait_seconds": 0.0}
        for step, value in enumerate(seconds, first)
    ]


def run_folder(
    folder: Path, *, on: str = "cpu:8", program: str = "gpt", kind: str = "cpu", seconds: Sequence[float] = (),
    size: str | None = None, workload: str = "gpt-nano",
) -> Path:  # fmt: skip
    """A folder as `spanax train` writes it: twelve steps, of which the first compiles."""
    machine = spanax.cluster(on)
    plan = spanax.plan(zoo_program(program), machine, layout="fsdp")
    folder.mkdir(exist_ok=True)
    config = TrainConfig(workload=workload).record()
    write_records(folder, config, plan.to_json(), [Device(kind)], machine.size if size is None else size)
    write_metrics(folder, [started(), *steps(seconds or (9.0, 5.0, *[0.5, 0.51, 0.49, 0.5, 0.5] * 2))])
    return folder


def write_metrics(folder: Path, events: Sequence[dict[str, Any]]) -> None:
    (folder / METRICS).write_text("".join(json.dumps(event) + "\n" for event in events))


def read(path: Path, **options: Any) -> MeasuredStep:
    (step,) = measured_steps([path], requested(**options))
    return step


def test_the_steps_after_compilation_are_read(tmp_path: Path) -> None:
    step = read(run_folder(tmp_path))
    assert len(step.steps.seconds) == 10 and step.steps.median == 0.5 and step.transfers == ()
    assert step.layout == "fsdp on fsdp=8" and step.source == str(tmp_path) and step.predicted(step.cluster) > 0


def test_only_the_last_attempt_is_read(tmp_path: Path) -> None:
    """An earlier one may have run on other devices."""
    events = [started(), *steps((9.0, 0.1, *[0.1] * 6)), started(8), *steps((9.0, 9.0, *[0.5] * 6), first=9)]
    write_metrics(run_folder(tmp_path), events)
    assert [step.seconds for step in metric_curves(tmp_path).steady] == [0.5] * 6


def test_damaged_lines_are_skipped_and_waits_counted(tmp_path: Path) -> None:
    events = [event | {"data_wait_seconds": 0.05 * event.get("step", 0)} for event in steps([0.5] * 12)]
    write_metrics(run_folder(tmp_path), [started(), *events, {"event": "step", "step": 13, "step_seconds": "nan"}])
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"event": "step", "step": 14, "step_se\n{"event": "step", "step": 15, "step_seconds": -1}\n')
    assert len(metric_curves(tmp_path).steady) == 10
    assert read(tmp_path).steps.wait_share == pytest.approx(0.1)


def test_another_number_of_devices_has_less_weight(tmp_path: Path) -> None:
    step = read(run_folder(tmp_path, on="cpu:4"))
    assert step.transfers == ("4 devices",) and step.cluster.num_devices == 4


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpanaxError, match="has 4 steady steps"):
        read(run_folder(tmp_path, seconds=[1.0] * 6))


def test_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpanaxError, match="measured on 'NVIDIA H100 80GB HBM3', which is not cpu") as raised:
        read(run_folder(tmp_path, kind="NVIDIA H100 80GB HBM3"))
    assert raised.value.exit_code == 2


def test_another_program_that_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpanaxError, match="measured another program, and its steps cannot be priced") as raised:
        read(run_folder(tmp_path, program="mlp", workload="evil.py:main"))
    assert "'evil.py:main' may not be loaded" in str(raised.value)


def test_another_traceable_program_has_less_weight(tmp_path: Path) -> None:
    program = load("gpt-nano").trace(learning_rate=1e-3, num_steps=100)
    plan = spanax.plan(program, "cpu:8", layout="fsdp")
    folder = run_folder(tmp_path)
    write_records(folder, TrainConfig(workload="gpt-nano").record(), plan.to_json(), [Device()], "8")
    (step,) = measured_steps([folder], dataclasses.replace(requested(), load=load))
    assert step.transfers == ("another program",)


@pytest.mark.parametrize("size", ["", "banana", "0", "7x"])
def test_a_record_without_its_devices_is_refused(size: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not record its devices|records impossible devices"):
        read(run_folder(tmp_path, size=size))


def test_records_of_older_versions_have_no_devices(tmp_path: Path) -> None:
    write_records(tmp_path, TrainConfig().record(), "{}\n", ["cpu:0"])
    environment = read_environment(tmp_path)
    assert (environment.device_kind, environment.size) == ("", "")


def test_a_path_that_is_not_a_run_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError):
        read(tmp_path)
    with pytest.raises(SpanaxError, match="is a cluster file, not a measured run") as raised:
        read(tmp_path / "mine.toml")
    assert "--on" in str(raised.value)
    for number, text in enumerate(("", "[]", "{", '{"rows": 3}', "[" * 100)):
        (tmp_path / f"{number}.json").write_text(text)
        with pytest.raises(DataError, match="is not a comparison"):
            read(tmp_path / f"{number}.json")


def test_links_and_flipped_bytes_in_a_run_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    text = (folder / ENVIRONMENT).read_text()
    (folder / ENVIRONMENT).write_text(text.replace('"cpu"', '"gpu"'))
    with pytest.raises(DataError, match="cannot read the environment"):
        read(folder)
    (folder / ENVIRONMENT).write_text(text)
    (folder / METRICS).unlink()
    os.symlink("/dev/zero", folder / METRICS)
    with pytest.raises(EntryError, match="symbolic link"):
        read(folder)


@functools.cache
def compared() -> dict[str, Any]:
    """What `spanax compare --json` prints of the three layouts of a mesh, with measured times."""
    program, machine = zoo_program("gpt"), spanax.cluster("cpu:8")
    search = layouts(program, machine, mesh=spanax.MeshShape.of("fsdp=8"), top=3)
    rows = [
        candidate_json(search, row) | {"measured": {"seconds": [1.0 + number] * 10, "core_seconds": [1.0] * 10}}
        for number, row in enumerate(search.candidates)
    ]
    return {
        "workload": "gpt", "batch": 16, "sequence_lengths": [8], "dtypes": list(search.setting.dtypes), "rows": rows,
        "device_kind": "cpu", "size": "8", "fingerprint": program.fingerprint,
    }  # fmt: skip


def comparison(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(compared() | changes))
    return path


def test_every_layout_of_a_comparison_is_read(tmp_path: Path) -> None:
    path = comparison(tmp_path / "compared.json")
    measured = measured_steps([path, path], requested())
    assert len(measured) == 6 and [step.steps.median for step in measured[:3]] == [1.0, 2.0, 3.0]
    data = json.loads(path.read_text())
    for step, row in zip(measured, data["rows"], strict=False):
        assert step.layout.startswith(f"{row['layout']} on ")
        assert step.predicted(step.cluster) == pytest.approx(row["step_seconds"], rel=0.01)


def test_slow_rounds_of_a_comparison_are_not_noise(tmp_path: Path) -> None:
    """A round runs a step of every layout: what slows all of them is the machine, not a layout."""
    path = comparison(tmp_path / "compared.json")
    data = json.loads(path.read_text())
    for number, row in enumerate(data["rows"]):
        row["measured"]["seconds"] = [(1.0 + number) * factor for factor in (1, 1, 2, 1, 1, 3, 3, 1, 3, 3)]
    path.write_text(json.dumps(data))
    for number, step in enumerate(measured_steps([path], requested())):
        assert step.steps.noise < 1e-9 and step.steps.median == pytest.approx((1.0 + number) * 1.5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"device_kind": "TPU v4"}, "measured on 'TPU v4'"),
        ({"fingerprint": "other"}, "measured another program"),
        ({"dtypes": ["bfloat16"]}, "was computed in bfloat16"),
        ({"size": None}, "is not a comparison"),
        ({"device_kind": ""}, "does not record its devices"),
    ],
)
def test_a_comparison_of_something_else_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpanaxError, match=message):
        measured_steps([comparison(tmp_path / "compared.json", **changes)], requested())


def test_a_layout_that_the_program_does_not_have_is_refused(tmp_path: Path) -> None:
    path = comparison(tmp_path / "compared.json")
    data = json.loads(path.read_text())
    data["rows"][0]["layout"] = "expert"
    path.write_text(json.dumps(data))
    with pytest.raises(SpanaxError, match="which this program cannot run"):
        measured_steps([path], requested())
