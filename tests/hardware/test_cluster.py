"""Clusters: by name without a device, from a file, or this machine as JAX sees it."""

import math
from pathlib import Path

import jax
import pytest

from machines import Device
from spanax.errors import SpanaxError
from spanax.hardware.chips import chip_named
from spanax.hardware.cluster import TYPES, Cluster, cluster, local

# name, its text, devices, shape, slices
NAMED = [
    ("a100-80gb:64", "a100-80gb:8x8", 64, (8, 8), 1),
    ("h100:2x4", "h100:2x4", 8, (2, 4), 1),
    ("h100:8", "h100:8", 8, (1, 8), 1),
    ("h100:3", "h100:3", 3, (1, 3), 1),
    ("gb200:144", "gb200:2x72", 144, (2, 72), 1),
    ("v5p:16", "v5p:2x2x4", 16, (2, 2, 4), 1),
    ("v5p:6144", "v5p:16x16x24", 6144, (16, 16, 24), 1),
    ("v5e:32", "v5e:4x8", 32, (4, 8), 1),
    ("v5e:16x16:2", "v5e:16x16:2", 512, (16, 16), 2),
    ("v5e:256:4", "v5e:16x16:4", 1024, (16, 16), 4),
    ("ironwood:128", "v7:4x4x4", 128, (4, 4, 4), 1),
    ("v3:2048", "v3:32x32", 2048, (32, 32), 1),
    ("8xH100", "h100:8", 8, (1, 8), 1),
    ("h100x16", "h100:2x8", 16, (2, 8), 1),
    ("a3-highgpu-8g:4", "h100:4x8", 32, (4, 8), 1),
    ("P5.48xlarge", "h100:8", 8, (1, 8), 1),
    ("Standard_ND96isr_H100_v5", "h100:8", 8, (1, 8), 1),
    ("ct6e-standard-4t:4", "v6e:4x4", 16, (4, 4), 1),
    ("v5litepod-256:2", "v5e:16x16:2", 512, (16, 16), 2),
    ("v5p-128", "v5p:4x4x4", 64, (4, 4, 4), 1),
]


@pytest.mark.parametrize(("name", "text", "devices", "shape", "slices"), NAMED, ids=lambda x: str(x))
def test_notation(name: str, text: str, devices: int, shape: tuple[int, ...], slices: int) -> None:
    actual = cluster(name)
    assert (str(actual), actual.num_devices, actual.shape, actual.num_slices) == (text, devices, shape, slices)
    assert cluster(str(actual)) == actual and actual.memory_bytes == actual.chip.usable_bytes
    assert actual.devices_per_node * math.prod(shape[:1] if not actual.is_torus else (slices,)) == devices


def test_every_machine_type_is_a_cluster() -> None:
    assert {name: cluster(name).num_devices for name in TYPES} == {name: count for name, (_, count) in TYPES.items()}


def test_by_name_and_number() -> None:
    assert cluster("v5p", 64) == cluster("v5p:4x4x4") and cluster("h100", 64) == cluster("h100:8x8")
    assert str(cluster("cpu", 4)) == "cpu:4" and str(cluster("cpu:8", 2)) == "cpu:2"
    assert cluster("h100:8x8", 16) == cluster("h100:2x8")
    assert cluster("rtx4090") == cluster("RTX-4090:1") and cluster("l4", 2) == cluster("l4:2")


def test_simulated_devices_share_what_the_host_has() -> None:
    each, eight, nodes = cluster("cpu:1"), cluster("cpu:8"), cluster("cpu:2x4")
    assert each.memory_bytes is not None and eight.memory_bytes == each.memory_bytes // 8
    assert nodes.memory_bytes == each.memory_bytes // 4
    assert eight.chip.peak_flops["fp32"] == each.chip.peak_flops["fp32"] / 8
    assert cluster("h100:8").chip.peak_flops == cluster("h100:1").chip.peak_flops


REFUSED = [
    ("cpu", "cluster 'cpu' has no valid number of devices", "cpu:8"),
    ("cpu:eight", "cluster 'cpu:eight' has no valid number of devices", "cpu:8"),
    ("h100:", "cluster 'h100:' has no valid number of devices", "h100:8"),
    ("cqu:8", "unknown chip 'cqu'", "'cpu'"),
    ("", "unknown chip ''", "known: v100"),
    ("h100:-8", "cluster 'h100:-8' has no valid number of devices", "h100:8"),
    ("h100:12", "12 devices of h100 do not fill nodes of 8", "h100:8, h100:16, or nodes x devices per node: h100:2x4"),
    ("h100:2x16", "a node of h100 has at most 8 devices", "h100:4x8"),
    ("h100:2x8:2", "cluster 'h100:2x8:2': h100 comes in nodes", "h100:4x8"),
    ("v5p", "cluster 'v5p' has no valid number of devices", "v5p:4x4x4"),
    ("v5p:4x4x4:0", "cluster 'v5p:4x4x4:0' has no valid number of devices", "v5p:4x4x4"),
    ("v5p:8x8", "a slice of v5p has 3 dims, and 8x8 has 2", "v5p:8x8x1"),
    ("v5e:4x4x4", "a slice of v5e has 2 dims, and 4x4x4 has 3", "v5e:4x4"),
    ("v6e:16x32", "a slice of v6e has at most 16x16 chips, and 16x32 is larger", "v6e:16x16"),
    ("v5p:3x2x1", "the 6 chips of 3x2x1 do not fill hosts of 4", "v5p:4x2x1"),
    ("v5p:7", "v5p has no slice of 7 chips", "v5p:4 or v5p:8"),
    ("v5e:512", "v5e has no slice of 512 chips", "2 slices: v5e:16x16:2"),
    ("v5p-15", "'v5p-15' counts TensorCores, and a chip has 2", "v5p-16"),
    ("v7:3", "3 devices of v7 do not fill chips of 2", "v7:4"),
]


@pytest.mark.parametrize(("name", "message", "fix"), REFUSED)
def test_an_invalid_value_raises(name: str, message: str, fix: str) -> None:
    with pytest.raises(SpanaxError) as caught:
        cluster(name)
    assert str(caught.value).startswith(message) and fix in str(caught.value).partition("fix: ")[2]
    assert caught.value.exit_code == 2 and len(str(caught.value).splitlines()) <= 4


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('like = "h100"\nname = "ours"\nshape = "4x8"\nmemory = "96 GiB"\nusable_memory = "94 GiB"\n')
    actual = cluster(str(path))
    assert (actual.chip.name, actual.num_devices, actual.memory_bytes) == ("ours", 32, 94 * 2**30)
    assert str(actual) == f"{path}:4x8" and cluster(str(actual)) == actual
    assert cluster(f"{path}:16").shape == (2, 8) and cluster(str(path), 16).shape == (2, 8)
    path.write_text('like = "h100"\n')
    with pytest.raises(SpanaxError, match="has no valid number of devices"):
        cluster(str(path))


def test_a_cluster_is_a_value() -> None:
    chip = chip_named("h100")
    assert Cluster(chip, 8, 2**30) == Cluster(chip, 8, 2**30) != Cluster(chip, 8)
    assert hash(cluster("h100:8x8")) == hash(cluster("h100:64")) and str(Cluster(chip, 8)) == "h100:8"


def test_local(devices: list[jax.Device]) -> None:
    assert local() == cluster("cpu", len(devices))
    assert local(devices[:2]) == cluster("cpu:2")


def test_local_gpus_in_nodes() -> None:
    actual = local([Device("NVIDIA H100 80GB HBM3", process_index=i // 8) for i in range(16)])
    assert (str(actual), actual.memory_bytes, actual.chip.name) == ("h100:2x8", 2**30, "h100")
    one_each = local([Device("NVIDIA H100 80GB HBM3", process_index=i, slice_index=i // 8) for i in range(16)])
    assert str(one_each) == "h100:2x8"
    assert local([Device("NVIDIA H100 80GB HBM3", limit=None)]).memory_bytes == chip_named("h100").usable_bytes


def test_local_tpus_in_their_torus() -> None:
    coords = [(x, y, z) for z in range(4) for y in range(2) for x in range(2)]
    actual = local([Device("TPU v5p", coords=c, slice_index=0) for c in coords])
    assert (actual.shape, actual.num_devices, actual.num_slices) == ((2, 2, 4), 16, 1)
    two = local(
        [Device("TPU v5 lite", coords=(x, y, 0), slice_index=s) for s in (0, 1) for x in (0, 1) for y in (0, 1)]
    )
    assert (str(two), two.num_devices) == ("v5e:2x2:2", 8)
    cores = local([Device("TPU7x", coords=(x, 0, 0), slice_index=0) for x in (0, 1) for _ in (0, 1)])
    assert (cores.shape, cores.num_devices) == ((2, 1, 1), 4)


def test_a_local_chip_of_unknown_kind_has_only_its_memory() -> None:
    actual = local([Device("Quantum 9") for _ in range(4)])
    assert (actual.chip.name, actual.num_devices, actual.memory_bytes) == ("Quantum 9", 4, 2**30)
    assert actual.chip.inside is None and not actual.chip.peak_flops
