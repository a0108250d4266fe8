"""The probe: what it writes is a cluster file that says what was measured. How fast this machine is, no test asks."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from machines import Device
from spanax.errors import SpanaxError
from spanax.hardware import probe as probing
from spanax.hardware.chips import chip_named
from spanax.hardware.cluster import Cluster, cluster
from spanax.hardware.collectives import collective_seconds
from spanax.hardware.links import axis_link
from spanax.hardware.measure import COLLECTIVE_BYTES, COLLECTIVES, Collected
from spanax.hardware.mesh import MeshShape
from spanax.hardware.probe import Fit, fitted, probe


def read(text: str, tmp_path: Path) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return cluster(str(path))


@pytest.mark.slow
def test_on_the_devices_present(devices: list[jax.Device], tmp_path: Path) -> None:
    text = probe(devices, seconds=1.5)
    actual = read(text, tmp_path)
    assert (
        actual.num_devices == len(devices)
        and actual.chip.shared
        and actual.memory_bytes == cluster("cpu:8").memory_bytes
    )
    assert (
        actual.chip.peak_flops["fp32"] > 0 and actual.chip.memory_bytes_per_second and actual.chip.kernel_start_seconds
    )
    assert actual.chip.inside and actual.chip.inside.name == "memory"
    message = tomllib.loads(text)
    assert all(value.startswith("probe of 8 x cpu, jax ") for value in message["source"].values())
    assert actual.chip.sources["inside.bytes_per_second"] == message["source"]["inside.rate"]
    for kind in COLLECTIVES:
        assert f"# {kind} over 8: 4 KiB: " in text and f"# {kind} over 2: 4 KiB: " in text
    assert "# matmul fp32, one device, by size: 128: " in text


@pytest.mark.slow
def test_on_shared_cores_the_start_is_measured_after_a_matmul(
    devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probing, "start_after_matmul_seconds", lambda devices, seconds: 0.25)
    text = probe(devices, seconds=0.1)
    actual = read(text, tmp_path)
    assert actual.chip.inside and actual.chip.inside.start_seconds == 0.25 and "# start alone: " in text


# ---- machines that are not here: what they would measure follows a cluster of which all is known


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the probe measure what a cluster file would predict."""

    def measures(truth: Cluster, matmul: float, memory: float) -> None:
        def collected(groups: Sequence[Sequence[Any]], limit_bytes: int, seconds: float) -> Iterator[Collected]:
            size = len(groups[0])
            across = groups[0][0].process_index != groups[0][1].process_index
            mesh = MeshShape.of({"out": size, "in": truth.num_devices // size} if across else {"in": size})
            if not across and size < truth.num_devices:
                mesh = MeshShape.of({"out": truth.num_devices // size, "in": size})
            link = axis_link(truth, mesh, "out" if across else "in")
            for kind in COLLECTIVES:
                for num_bytes in COLLECTIVE_BYTES:
                    took = collective_seconds(kind, num_bytes, link)
                    yield Collected(kind, size, num_bytes, took)

        monkeypatch.setattr(probing, "matmul_rates", lambda devices, dtype, seconds: {512: matmul / 3, 4096: matmul})
        monkeypatch.setattr(probing, "memory_rate", lambda devices, num_bytes, seconds: memory)
        monkeypatch.setattr(probing, "kernel_start_seconds", lambda devices, seconds: 4e-6)
        monkeypatch.setattr(probing, "collected", collected)

    return measures


def test_a_known_chip_uses_its_data_sheet(machine: Any, tmp_path: Path) -> None:
    truth, sheet = cluster("h100:2x8"), chip_named("h100")
    machine(truth, 600e12, 3e12)
    devices = [Device("NVIDIA H100 80GB HBM3", process_index=i // 8, limit=60 * 2**30) for i in range(16)]
    actual = read(probe(devices, seconds=1), tmp_path)
    assert (actual.shape, actual.memory_bytes, actual.chip.memory_bytes) == ((2, 8), 60 * 2**30, sheet.memory_bytes)
    assert actual.chip.peak_flops == {**sheet.peak_flops, "fp32": 600e12}, "more than on the data sheet"
    assert actual.chip.flops_per_second("bf16") == pytest.approx(600e12, rel=1e-3)
    assert actual.chip.memory_share == pytest.approx(3 / 3.35, rel=1e-3) and actual.chip.kernel_start_seconds == 4e-6
    mesh = MeshShape.of("data=2,model=8")
    for axis in mesh.names:
        result, true = axis_link(actual, mesh, axis), axis_link(truth, mesh, axis)
        for kind in ("all_gather", "all_reduce"):
            for num_bytes in (2**20, 2**30):
                seconds = collective_seconds(kind, num_bytes, result)  # type: ignore[arg-type]
                # The fit knows no trees: from the largest size measured on it is the true time.
                bound = 0.02 if num_bytes == 2**30 else 0.3
                assert seconds == pytest.approx(collective_seconds(kind, num_bytes, true), rel=bound)  # type: ignore[arg-type]


def test_a_rate_above_the_data_sheet_is_written_unchanged(machine: Any, tmp_path: Path) -> None:
    machine(cluster("h100:8"), 1200e12, 4e12)
    actual = read(probe([Device("NVIDIA H100 80GB HBM3") for _ in range(8)], seconds=1), tmp_path)
    assert actual.chip.peak_flops["bf16"] == 1200e12 and actual.chip.flops_per_second("bf16") == 1200e12
    assert actual.chip.memory_bytes_per_second == 4e12 and actual.chip.memory_share == 1


def test_links_of_a_torus_are_unchanged(machine: Any, tmp_path: Path) -> None:
    truth = cluster("v5e:4x4")
    machine(truth, 150e12, 0.7e12)
    devices = [Device("TPU v5 lite", coords=(x, y, 0), slice_index=0) for x in range(4) for y in range(4)]
    actual = read(probe(devices, seconds=1), tmp_path)
    assert actual.shape == (4, 4) and actual.chip.inside and actual.chip.inside.kind == "torus"
    assert actual.chip.inside.share == pytest.approx(0.9, rel=1e-2)
    assert actual.chip.inside.bytes_per_second == chip_named("v5e").inside.bytes_per_second  # type: ignore[union-attr]


def test_an_unknown_chip_has_only_measured_numbers(machine: Any, tmp_path: Path) -> None:
    machine(cluster("a100:8"), 50e12, 1e12)
    actual = read(probe([Device("Quantum 9") for _ in range(8)], seconds=1), tmp_path)
    assert (actual.chip.name, actual.memory_bytes) == ("Quantum 9", 2**30)
    assert set(actual.chip.peak_flops) == {"bf16", "fp16", "fp32"} and actual.chip.flops_per_second("fp16") == 50e12
    assert actual.chip.inside and actual.chip.inside.bytes_per_second == pytest.approx(300e9 * 0.76, rel=0.05)
    with pytest.raises(SpanaxError, match="its memory is unknown"):
        probe([Device("Quantum 9", limit=None)], seconds=1)


def test_one_device_has_no_links(machine: Any) -> None:
    machine(cluster("h100:1"), 600e12, 3e12)
    assert "[inside]" not in probe([Device("NVIDIA H100 80GB HBM3")], seconds=1)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_probe_takes_time(seconds: float) -> None:
    with pytest.raises(SpanaxError, match="measures nothing"):
        probe([], seconds=seconds)


def points(fit: Fit, sizes: Sequence[int]) -> list[Collected]:
    rate, latency, start = fit.bytes_per_second, fit.latency_seconds, fit.start_seconds
    steps = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    return [
        Collected(kind, n, b, start + times * (n - 1) * (latency + b / n / rate))  # type: ignore[arg-type]
        for kind, times in steps.items()
        for n in sizes
        for b in COLLECTIVE_BYTES
    ]


@pytest.mark.parametrize("sizes", [(2, 8), (8,), (4,)])
@pytest.mark.parametrize("fit", [Fit(1e9, 2e-6, 30e-6, 0), Fit(300e9, 0, 5e-6, 0), Fit(20e9, 5e-6, 0, 0)])
def test_a_fit_recovers_rate_latency_and_start(fit: Fit, sizes: Sequence[int]) -> None:
    result = fitted(points(fit, sizes))
    assert result.error < 1e-6 and result.bytes_per_second == pytest.approx(fit.bytes_per_second, rel=1e-5)
    assert result.latency_seconds == pytest.approx(fit.latency_seconds, abs=1e-12)
    assert result.start_seconds == pytest.approx(fit.start_seconds, abs=1e-12)


def test_a_fit_has_no_negative_parameter() -> None:
    actual = [Collected("all_gather", n, b, b / 1e9 * (1 + b / 2**20)) for n in (2, 8) for b in (2**16, 2**18, 2**20)]
    result = fitted(actual)
    assert (
        result.latency_seconds >= 0
        and result.start_seconds >= 0
        and result.bytes_per_second > 0
        and result.error > 0.05
    )
