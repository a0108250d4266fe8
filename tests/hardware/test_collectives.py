"""Collectives: against published times by size, and against the worked answers of the scaling book."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from spanax.hardware.cluster import Cluster, cluster
from spanax.hardware.collectives import Collective, collective_seconds
from spanax.hardware.links import AxisLink, axis_link
from spanax.hardware.mesh import MeshShape

# Every row says which publication it is from (stas00/ml-engineering, jax-ml/scaling-book).
MEASURED = list(csv.DictReader((Path(__file__).parent.parent / "data" / "collectives.csv").read_text().splitlines()))
MIB = 2**20


def over_all(actual: Cluster) -> AxisLink:
    return axis_link(actual, MeshShape.of({"data": actual.num_devices}), "data")


def errors(device: str, link: AxisLink, from_bytes: int = 0) -> np.ndarray:
    """Relative error of the all-reduce at every measured size."""
    rows = [row for row in MEASURED if row["device"] == device and row["time_us"] and float(row["bytes"]) >= from_bytes]
    num_bytes, micros = (np.array([float(row[key]) for row in rows]) for key in ("bytes", "time_us"))
    assert len(num_bytes) >= 5
    return collective_seconds("all_reduce", num_bytes, link) / micros * 1e6 - 1


# device in the file, cluster, bounds on the mean error from 32 KiB to 16 GiB and from 512 MiB on. Measured: 13.0, 6.1
# and 10.2 %, and 2.1, 1.5 and 4.8 %.
CURVES = [
    ("A100 8x NVLink3", "a100:8", 0.14, 0.03),
    ("H200 8x NVLink4", "h200:8", 0.07, 0.02),
    ("B200 8x NVLink5 (p6-b200)", "b200:8", 0.11, 0.06),
]


@pytest.mark.parametrize(("device", "name", "bound", "large_bound"), CURVES)
def test_all_reduce_by_size(device: str, name: str, bound: float, large_bound: float) -> None:
    link = over_all(cluster(name))
    assert np.abs(errors(device, link)).mean() <= bound
    assert np.abs(errors(device, link, 512 * MIB)).mean() <= large_bound


def test_the_page_states_the_measured_errors() -> None:
    page = (Path(__file__).parent.parent.parent / "notes" / "planner.md").read_text()
    for device, name, *_ in CURVES:
        link = over_all(cluster(name))
        every, large = (100 * np.abs(errors(device, link, size)).mean() for size in (0, 512 * MIB))
        assert f"| {device.split()[0]} | {every:.1f} % | {large:.1f} % |" in page


def test_all_reduce_over_nodes() -> None:
    """Four nodes over EFA: the rate is the catalogue's, the latency of one step EFA's own (85 us, against 14)."""
    device = "B200 32x (4 nodes p6-b200, 8x400Gb EFAv4 each)"
    actual = cluster("b200:32")
    assert actual.chip.between
    efa = replace(actual.chip, between=replace(actual.chip.between, latency_seconds=85e-6))
    assert np.abs(errors(device, over_all(actual), 1024 * MIB)).mean() <= 0.02
    assert np.abs(errors(device, over_all(replace(actual, chip=efa)), MIB // 8)).mean() <= 0.10


# What one collective reached of large arrays: cluster, kind, GB/s of "bus bandwidth", bound on the error.
RATES = [
    ("h200:8", "all_gather", "361.4", 0.01),
    ("h200:8", "reduce_scatter", "362.9", 0.01),
    ("h200:4", "all_reduce", "363.3", 0.01),
    ("h200:8", "all_reduce", "473.1", 0.03),
    ("b200:4", "all_reduce", "673.2", 0.02),
    ("b200:6", "all_reduce", "778.2", 0.06),
    ("h200:32", "all_reduce", "364.87", 0.03),
    ("mi300x:8", "all_reduce", "312.912", 0.02),
    ("mi300x:2", "all_reduce", "47.671", 0.08),
]


@pytest.mark.parametrize(("name", "kind", "rate", "bound"), RATES)
def test_rates_of_large_arrays(name: str, kind: str, rate: str, bound: float) -> None:
    row = next(row for row in MEASURED if row["busbw_gbs"] == rate)
    n, num_bytes = int(row["n_ranks"]), float(row["bytes"])
    assert n == cluster(name).num_devices and row["collective"].replace("-", "_") == kind
    times = 2 if kind == "all_reduce" else 1
    measured = times * (n - 1) / n * num_bytes / float(rate) / 1e9
    assert collective_seconds(kind, num_bytes, over_all(cluster(name))) == pytest.approx(measured, rel=bound)  # type: ignore[arg-type]


# ---- jax-ml/scaling-book @0819a7d. It omits (n - 1) / n for a closed ring, which `whole` restores.


def test_all_gather_over_a_line_of_v5e() -> None:
    link = axis_link(cluster("v5e:4x4"), MeshShape.of("x=4,y=4"), "y")
    seconds = collective_seconds("all_gather", 2 * 2048 * 8192, link)
    assert seconds - link.start_seconds - 3 * link.latency_seconds == pytest.approx(0.00056, rel=0.005)
    assert seconds == pytest.approx(680e-6, rel=0.18), "measured"
    assert collective_seconds("all_gather", 131072, link) == pytest.approx(8e-6, rel=0.03), "measured"


@pytest.mark.parametrize(("axes", "seconds", "whole"), [("x", 2.3e-5, 3 / 4), (("x", "y"), 4.6e-5, 15 / 16)])
def test_all_gather_on_v4(axes: str | tuple[str, ...], seconds: float, whole: float) -> None:
    """bf16[1024, 4096] split over x and y: gathered over x it is still split over y."""
    link = axis_link(cluster("v4:4x4x4"), MeshShape.of("x=4,y=4,z=4"), axes)
    num_bytes = 2 * 1024 * 4096 // (4 if axes == "x" else 1)
    latency = link.start_seconds + (link.size - 1) * link.latency_seconds
    assert collective_seconds("all_gather", num_bytes, link) - latency == pytest.approx(seconds * whole, rel=0.03)


def test_all_reduce_on_v4() -> None:
    link = axis_link(cluster("v4:4x4x4"), MeshShape.of("x=4,y=4,z=4"), "z")
    link = replace(link, start_seconds=0.0, latency_seconds=0.0)
    seconds = collective_seconds("all_reduce", 2 * 1024 * 4096, link)
    assert seconds == pytest.approx(0.000186 * 3 / 4, rel=0.01)


# ---- the formulas themselves


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    link = over_all(cluster("v5p:4x4x4"))
    parts = [collective_seconds(kind, 1e9, link) for kind in ("reduce_scatter", "all_gather")]  # type: ignore[arg-type]
    assert collective_seconds("all_reduce", 1e9, link) == pytest.approx(sum(parts) - link.start_seconds)


LINK = AxisLink(64, *[100e9] * 4, latency_seconds=1e-6, tree_latency_seconds=6e-6, start_seconds=0.0)


def test_small_arrays_use_trees_and_large_ones_rings() -> None:
    assert collective_seconds("all_reduce", 8, LINK) == pytest.approx(2 * 6e-6, rel=1e-3)
    assert collective_seconds("all_reduce", 1e12, LINK) == pytest.approx(2 * 63 / 64 * 10 + 126e-6)


@pytest.mark.parametrize("kind", get_args(Collective))
def test_arrays_and_numbers_are_accepted(kind: Collective) -> None:
    num_bytes, sizes = np.array([[1e3], [1e6], [1e9]]), np.array([1, 2, 8, 64])
    result = collective_seconds(kind, num_bytes, replace(LINK, size=sizes))
    assert result.shape == (3, 4) and (result[:, 0] == 0).all() and (np.diff(result[:, 1:], axis=0) > 0).all()
    for i, j in np.ndindex(3, 4):
        each = collective_seconds(kind, float(num_bytes[i, 0]), replace(LINK, size=int(sizes[j])))
        assert isinstance(each, float) and each == pytest.approx(result[i, j], rel=1e-12)


def test_one_device_waits_for_no_other() -> None:
    link = axis_link(cluster("h100:8"), MeshShape.of("data=1,model=8"), "data")
    assert [collective_seconds(kind, 1e9, link) for kind in get_args(Collective)] == [0.0] * 5


def test_an_all_to_all_on_a_ring_takes_a_quarter_of_an_all_gather() -> None:
    link = axis_link(cluster("v5e:16x16"), MeshShape.of("x=16,y=16"), "x")
    link = replace(link, start_seconds=0.0, latency_seconds=0.0, tree_latency_seconds=0.0)
    whole = 1e9
    gather = collective_seconds("all_gather", whole, link) / (15 / 16)
    assert collective_seconds("all_to_all", whole / 16, link) == pytest.approx(gather / 4)
