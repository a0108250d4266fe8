"""A run that continues on other devices: the same state and data, another plan."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from launched import WORKLOAD, arrays, examples, losses
from sampling import sampled
from spanax.errors import ConfigError, SpanaxError
from spanax.models.workloads import load
from spanax.sealed import opened, sealed
from spanax.train.config import TrainConfig
from spanax.train.record import events
from spanax.train.record.folder import config_text
from spanax.train.state.restore import restore
from spanax.train.store import manifest
from spanax.train.trainer import train


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def go_on(num_devices: int, until: int, resume: bool | None = None, **settings: Any) -> list[dict[str, Any]]:
    """A part of the run `elastic`, started as by the command line and stopped after a step."""
    output: list[dict[str, Any]] = []

    def emit(event: dict[str, Any]) -> None:
        output.append(event)
        if event["event"] == "step" and event["step"] == until < 8:
            os.kill(os.getpid(), signal.SIGTERM)

    config = TrainConfig(
        workload="small.py:small", output_dir="elastic", steps=8, save_every=0, seed=5, keep_last=9,
            devices=num_devices,
        resume=until > 2 if resume is None else resume, **settings,
    )  # fmt: skip
    train(lambda **sizes: load(config.workload, **sizes), config, jax.devices()[:num_devices], emit)
    assert output[-1]["event"] == ("preempted" if until < 8 else "done")
    return output


COURSES = [((8, 2), (4, 4), (6, 6), (8, 8)), ((8, 4), (6, 8))]
"""Devices, and the step until which a run has them."""


@pytest.mark.parametrize("course", sampled([(course,) for course in COURSES], [(COURSES[1],)]))
def test_eight_four_six_eight(place: Path, course: tuple[tuple[int, int], ...]) -> None:
    """The examples come in the order of a run that never changed, and the losses are its losses."""
    for num_devices, until in course:
        go_on(num_devices, until, layout="fsdp", resume=(num_devices, until) != course[0])
    begins = [event for event in events.read(place / "elastic").records if event["event"] == "begin"]
    ends = [0, *(until for _, until in course)]
    assert [(event["devices"], event["step"]) for event in begins] == [
        (num_devices, begin) for (num_devices, _), begin in zip(course, ends, strict=False)
    ]
    uninterrupted = TrainConfig(workload="small.py:small", output_dir="uninterrupted", steps=8, seed=5, layout="fsdp")
    train(lambda **sizes: load(uninterrupted.workload, **sizes), uninterrupted, jax.devices(), lambda event: None)
    assert examples(place / "elastic") == examples(place / "uninterrupted")
    np.testing.assert_allclose(losses(place / "elastic"), losses(place / "uninterrupted"), rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [4, 6, 1])
def test_a_change_of_mesh_preserves_every_bit(place: Path, num_devices: int) -> None:
    go_on(8, 2, layout="fsdp")
    before = arrays(place / "elastic", 2)
    program, plan = _planned(num_devices)
    run = restore(program, plan, place / "elastic" / "checkpoints", devices=jax.devices()[:num_devices])
    for path, array in run.arrays().items():
        mine = jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        assert np.asarray(mine).tobytes() == before[path].tobytes(), path


def _planned(num_devices: int) -> tuple[Any, Any]:
    import spanax
    from spanax.hardware.cluster import local

    workload = load("small.py:small", batch_size=None, seq_len=None)
    program = workload.trace(learning_rate=1e-3, num_steps=2)
    return program, spanax.plan(program, local(jax.devices()[:num_devices]), layout="fsdp")


@pytest.mark.slow
def test_if_the_layout_does_not_apply_the_planner_chooses(place: Path) -> None:
    go_on(8, 2, layout="fsdp+tensor", mesh="fsdp=2,model=4")
    output = go_on(5, 4, layout="fsdp+tensor")
    (warning,) = (event["message"] for event in output if event["event"] == "warning")
    assert warning.startswith("8 devices before, 5 now: ") and "1 devices idle" in warning
    (replanned,) = (event for event in events.read(place / "elastic").records if event["event"] == "replanned")
    assert replanned["before"] == 8 and replanned["idle"] == 1 and replanned["devices"] == 4
    assert manifest.steps(place / "elastic" / "checkpoints") == [2, 4]


def test_a_requested_layout_is_not_replaced(place: Path) -> None:
    go_on(8, 2, layout="fsdp")
    with pytest.raises(SpanaxError, match="model"):
        go_on(5, 4, layout="tensor")
    with pytest.raises(SpanaxError, match="fsdp"):
        go_on(6, 4, layout="fsdp", mesh="fsdp=5")


@pytest.mark.parametrize(
    "setting",
    [
        {"global_batch_size": 48},
        {"seq_len": 8},
        {"seed": 6},
        {"data": "python"},
        {"tokenizer": "bpe"},
        {"workload": "small.py:other"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_another_run_is_not_resumed(place: Path, setting: dict[str, Any]) -> None:
    (place / "elastic").mkdir()
    begun = {
        "workload": "small.py:small",
        "data": "a.txt",
        "tokenizer": "bytes",
        "global_batch_size": 24,
        "seq_len": 16,
        "seed": 5,
    }
    (place / "elastic" / "config.toml").write_text(sealed(config_text(begun)))
    config = TrainConfig(output_dir="elastic", resume=True, steps=2, **begun | setting)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"cannot be resumed with {next(iter(setting.values()))}") as reported:
        train(lambda **sizes: load("small.py:small", **sizes), config, jax.devices(), lambda event: None)
    assert reported.value.exit_code == 78 and len(str(reported.value).splitlines()) <= 4


@pytest.mark.slow
def test_another_version_warns(place: Path) -> None:
    go_on(8, 2, layout="fsdp")
    path = place / "elastic" / "env.json"
    environment = json.loads(opened(path.read_text()).text)
    environment["packages"]["optax"] = "0.0.1"
    path.write_text(sealed(json.dumps(environment, indent=1)))
    output = go_on(8, 4, layout="fsdp")
    (warning,) = (event["message"] for event in output if event["event"] == "warning")
    assert "optax 0.0.1, now " in warning
