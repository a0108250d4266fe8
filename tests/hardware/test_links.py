"""Links: what each mesh axis runs over, and how fast, on switches and in tori."""

import math

import pytest

from spanax.errors import SpanaxError
from spanax.hardware.chip import Chip
from spanax.hardware.cluster import Cluster, cluster
from spanax.hardware.collectives import collective_seconds
from spanax.hardware.links import axis_link
from spanax.hardware.mesh import MeshShape
from spanax.hardware.torus import Part, joined, place

NVLINK, NETWORK = 450e9 * 0.805, 50e9 * 0.91
LINE = 100e9 * 0.9


# ---- switches: h100:4x8. mesh, axes, over, rate of all_gather, members in a node


@pytest.mark.parametrize(
    ("mesh", "axes", "over", "rate"),
    [
        ("data=4,model=8", "model", "nvlink", NVLINK),
        ("data=4,model=8", "data", "infiniband", NETWORK),
        ("data=8,model=4", "data", "nvlink+infiniband", 2 * NETWORK),
        ("data=2,model=16", "model", "nvlink+infiniband", NVLINK),
        ("data=32", "data", "nvlink+infiniband", NVLINK),
        ("data=4,fsdp=4,model=2", "fsdp", "nvlink", NVLINK),
        ("data=4,fsdp=4,model=2", ("data", "fsdp"), "nvlink+infiniband", 4 * NETWORK),
        ("data=4,fsdp=4,model=2", ("data", "model"), "nvlink+infiniband", 2 * NETWORK),
        ("data=32,model=1", "model", "one device", math.inf),
    ],
)
def test_links_through_switches(mesh: str, axes: str | tuple[str, ...], over: str, rate: float) -> None:
    link = axis_link(cluster("h100:4x8"), MeshShape.of(mesh), axes)
    assert link.over == over and link.size == MeshShape.of(mesh).ways((axes,) if isinstance(axes, str) else axes)
    expected = min(rate, NVLINK) if math.isfinite(rate) else rate
    assert link.bytes_per_second == pytest.approx(expected)


def test_nodes_may_be_smaller_than_usual() -> None:
    mesh = MeshShape.of("data=4,model=8")
    assert axis_link(cluster("h100:8x4"), mesh, "model").over == "nvlink+infiniband"
    assert axis_link(cluster("h100:8x4"), MeshShape.of("data=8,model=4"), "model").over == "nvlink"


def test_in_switch_reduction_requires_enough_devices() -> None:
    actual = cluster("h100:8")
    few = axis_link(actual, MeshShape.of("data=2,model=4"), "model")
    all_of_them = axis_link(actual, MeshShape.of("model=8"), "model")
    assert few.all_reduce_bytes_per_second == few.bytes_per_second == pytest.approx(NVLINK)
    assert all_of_them.all_reduce_bytes_per_second == pytest.approx(450e9 * 1.04)


def test_latencies_across_nodes() -> None:
    actual = cluster("h100:4x8")
    assert actual.chip.inside and actual.chip.between
    inside, between = actual.chip.inside.latency_seconds, actual.chip.between.latency_seconds
    link = axis_link(actual, MeshShape.of("data=32"), "data")
    assert 32 * link.latency_seconds == pytest.approx(28 * inside + 4 * between)
    assert link.tree_latency_seconds == pytest.approx(3 * inside + 2 * between)


def test_an_all_to_all_across_nodes_is_limited_by_the_network() -> None:
    link = axis_link(cluster("h100:4x8"), MeshShape.of("expert=32"), "expert")
    seconds = 31 / 32 / link.all_to_all_bytes_per_second
    assert seconds == pytest.approx(24 / 32 / NETWORK)


@pytest.mark.parametrize(
    ("devices", "size", "dispatch", "combine"),
    [("h100:2x8", 16, 90e9, 81e9), ("h100:4x8", 32, 61e9, 61e9), ("b200:8", 8, 726e9, 740e9)],
)
def test_an_all_to_all_is_as_fast_as_tokens_are_sent_to_experts(
    devices: str, size: int, dispatch: float, combine: float
) -> None:
    """Bytes of a device, its own part included, per second. Source: deepseek-ai/DeepEP @0297fc8, README.md."""
    link = axis_link(cluster(devices), MeshShape.of(f"expert={size}"), "expert")
    rate = 1e9 / collective_seconds("all_to_all", 1e9, link)
    assert min(dispatch, combine) * 0.95 < rate < max(dispatch, combine) * 1.05


def test_direct_links_connect_pairs_of_devices() -> None:
    actual = cluster("mi300x:8")
    two = axis_link(actual, MeshShape.of("data=4,model=2"), "model")
    assert two.bytes_per_second == two.permute_bytes_per_second == pytest.approx(64e9 * 0.7)
    all_of_them = axis_link(actual, MeshShape.of("model=8"), "model")
    assert all_of_them.bytes_per_second == pytest.approx(448e9 * 0.7)
    assert all_of_them.permute_bytes_per_second == pytest.approx(64e9 * 0.7)


# ---- tori. cluster, mesh, axes, lines used together, over


@pytest.mark.parametrize(
    ("name", "mesh", "axes", "lines", "over"),
    [
        ("v5p:8x8x8", "data=64,model=8", "model", 2, "ici 1 axis, wrapped"),
        ("v5p:8x8x8", "data=64,model=8", "data", 4, "ici 2 axes, wrapped"),
        ("v5p:8x8x8", "fsdp=512", "fsdp", 6, "ici 3 axes, wrapped"),
        ("v5p:8x8x8", "data=8,fsdp=8,model=8", ("data", "fsdp"), 4, "ici 2 axes, wrapped"),
        ("v5p:8x8x8", "data=128,model=4", "model", 1, "ici 1 axis, not wrapped"),
        ("v5p:2x2x2", "data=4,model=2", "data", 2, "ici 2 axes, not wrapped"),
        ("v5p:2x4x4", "data=2,model=16", "model", 2, "ici 2 axes, not wrapped"),
        ("v6e:16x16", "data=16,model=16", "model", 2, "ici 1 axis, wrapped"),
        ("v6e:8x16", "data=16,model=8", "model", 1, "ici 1 axis, not wrapped"),
        ("v6e:8x8", "fsdp=64", "fsdp", 2, "ici 2 axes, not wrapped"),
    ],
)
def test_links_of_a_torus(name: str, mesh: str, axes: str | tuple[str, ...], lines: int, over: str) -> None:
    link = axis_link(cluster(name), MeshShape.of(mesh), axes)
    assert (link.bytes_per_second / LINE, link.over) == (pytest.approx(lines), over)


def test_hops_in_a_torus() -> None:
    actual = cluster("v5p:8x8x8")
    ring = axis_link(actual, MeshShape.of("data=64,model=8"), "model")
    assert ring.tree_latency_seconds == pytest.approx(4e-6) and 7 * ring.latency_seconds == pytest.approx(4e-6)
    row = axis_link(cluster("v6e:8x8"), MeshShape.of("data=8,model=8"), "model")
    assert row.tree_latency_seconds == pytest.approx(7e-6)


def test_two_halves_of_a_ring_share_its_lines() -> None:
    actual, mesh = cluster("v6e:16x16"), MeshShape.of("a=16,b=8,c=2")
    outer, inner = axis_link(actual, mesh, "b"), axis_link(actual, mesh, "c")
    assert (outer.bytes_per_second / LINE, inner.bytes_per_second / LINE) == (pytest.approx(1), pytest.approx(1))
    assert axis_link(actual, mesh, ("b", "c")).bytes_per_second / LINE == pytest.approx(2)


def test_the_two_devices_of_a_v7_chip() -> None:
    actual, line = cluster("v7:4x4x4"), 50e9 * 0.9
    on_chip = axis_link(actual, MeshShape.of("data=64,model=2"), "model")
    assert (on_chip.over, on_chip.bytes_per_second) == ("on chip", 600e9)
    cubes = axis_link(actual, MeshShape.of("data=64,model=2"), "data")
    assert cubes.bytes_per_second == pytest.approx(6 * line)
    everything = axis_link(actual, MeshShape.of("data=128"), "data")
    assert everything.bytes_per_second == pytest.approx(2 * 6 * line)


def test_slices_are_joined_by_the_network() -> None:
    actual, dcn = cluster("v6e:16x16:4"), 12.5e9 * 0.91
    outer = axis_link(actual, MeshShape.of("data=4,fsdp=256"), "data")
    assert (outer.over, outer.bytes_per_second) == ("dcn", pytest.approx(dcn))
    inner = axis_link(actual, MeshShape.of("data=4,fsdp=256"), "fsdp")
    assert (inner.over, inner.bytes_per_second) == ("ici 2 axes, wrapped", pytest.approx(4 * LINE))
    across = axis_link(actual, MeshShape.of("data=64,model=16"), "data")
    assert across.over == "ici 1 axis, wrapped+dcn" and across.bytes_per_second == pytest.approx(
        min(2 * LINE, 16 * dcn)
    )


@pytest.mark.parametrize(
    ("actual", "mesh", "axes", "message"),
    [
        (cluster("h100:8"), "data=8", "model", "the mesh has no axis 'model'"),
        (cluster("v5p:4x4x4"), "data=32", "data", "mesh axes of 32 do not fill 64 devices"),
        (Cluster(Chip("Quantum 9"), 8), "data=8", "data", "the link of 'Quantum 9' between devices is unknown"),
        (cluster("cpu:2x4"), "data=8", "data", "the link of 'cpu' between nodes is unknown"),
    ],
)
def test_an_invalid_value_raises(actual: Cluster, mesh: str, axes: str, message: str) -> None:
    with pytest.raises(SpanaxError) as caught:
        axis_link(actual, MeshShape.of(mesh), axes)
    assert str(caught.value).startswith(message)


def test_every_chip_has_a_link_for_every_mesh() -> None:
    sizes = [(a, b, c) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) for c in (1, 2, 4, 8) if a * b * c == 64]
    for name in ("a100", "b200", "l4", "mi300x", "v3", "v4", "v5e", "v5p", "v7"):
        actual = cluster(f"{name}:64")
        for shape in sizes:
            mesh = MeshShape.of(dict(zip("abc", shape, strict=True)))
            links = [axis_link(actual, mesh, axis) for axis in "abc"]
            together = axis_link(actual, mesh, ("a", "b", "c"))
            assert math.prod(link.size for link in links) == together.size == 64
            for link in (*links, together):
                rates = (link.bytes_per_second, link.all_to_all_bytes_per_second, link.permute_bytes_per_second)
                assert all(rate > 0 for rate in rates) and link.over


# ---- which dims of a torus an axis takes


def test_every_device_has_one_place() -> None:
    """The parts of all axes cover every dim once, for any mesh."""
    for shape in ((4, 4, 4), (4, 8, 12), (16, 16), (2, 2, 4)):
        size = math.prod(shape)
        pairs = [(a, size // a) for a in range(1, size + 1) if size % a == 0]
        for sizes in pairs:
            parts = [part for axis in place(sizes, shape, (True,) * len(shape)) for part in axis]
            for dim, length in enumerate(shape):
                mine = sorted((part.stride, part.size) for part in parts if part.dim == dim)
                end = 1
                for stride, part_size in mine:
                    assert stride == end
                    end *= part_size
                assert end == length


def test_adjacent_parts_are_merged() -> None:
    parts = [Part(0, 2, 4, False), Part(0, 1, 2, False), Part(1, 2, 2, True)]
    assert joined(parts, (8, 4), (True, True)) == [Part(0, 1, 8, True), Part(1, 2, 2, True)]
    assert joined(parts[:2], (16, 4), (True, True)) == [Part(0, 1, 8, False)]
