"""The catalogue: complete, sourced and within reason; and a table of one's own, read by the same reader."""

from pathlib import Path
from typing import Any

import pytest

from spanax.errors import DataError, SpanaxError
from spanax.hardware.chip import Chip
from spanax.hardware.chips import catalogue, chip_named, chip_names, chip_of_kind, read_chip, read_file

TERA = 1e12
SMALLEST: dict[str, Any] = {"peak": {"bf16": "100 TFLOP/s"}, "memory": "16 GiB", "memory_rate": "1 TB/s"}


def test_the_catalog_has_these_chips_and_aliases() -> None:
    gpus = "v100-32gb v100-16gb a100-80gb a100-40gb h100 h200 b200 gb200 b300 gb300 l4 l40s mi300x"
    gpus += " a10 a10g t4 rtx3090 rtx4090 rtx5090 rtxa6000"
    assert set(catalogue()) == {*gpus.split(), *"v3 v4 v5e v5p v6e v7 cpu".split()}
    aliases = {"v100": "v100-32gb", "a100": "a100-80gb", "h100-80gb": "h100", "tpu7x": "v7", "ironwood": "v7"}
    for alias, name in (aliases | {"tpu-v5p": "v5p", "Trillium": "v6e", "A100": "a100-80gb"}).items():
        assert chip_named(alias).name == name


def test_no_name_means_two_chips() -> None:
    text = [name for chip in catalogue().values() for name in (chip.name, *chip.aliases)]
    kinds = [kind for chip in catalogue().values() for kind in chip.device_kinds]
    assert len(text) == len(set(text)) == len(chip_names())
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("chip", catalogue().values(), ids=lambda chip: chip.name)
def test_every_number_has_its_source(chip: Chip) -> None:
    assert len(chip.sources) >= 5
    bare = [key for key, source in chip.sources.items() if len(source) < 8 or source.startswith("as written in")]
    assert not bare


@pytest.mark.parametrize("chip", [c for c in catalogue().values() if c.name != "cpu"], ids=lambda chip: chip.name)
def test_the_numbers_fit_each_other(chip: Chip) -> None:
    assert chip.memory_bytes and chip.usable_bytes and chip.memory_bytes_per_second and chip.inside and chip.between
    assert 0.85 * chip.memory_bytes < chip.usable_bytes <= chip.memory_bytes
    assert chip.between.bytes_per_second < chip.inside.bytes_per_second
    assert all(share <= 1 for share in chip.matmul_shares.values()) and chip.memory_share <= 1
    assert chip.peak_flops["fp32"] <= max(chip.peak_flops.get("bf16", 0), chip.peak_flops.get("fp16", 0))
    assert chip.flops_per_second("fp32") <= chip.peak_flops["fp32"]
    if chip.inside.kind == "torus":
        assert len(chip.inside.max_shape) in (2, 3) and (chip.inside.wrap_size or chip.inside.wrap_multiple)


# name, bf16 TFLOP/s, memory, TB/s, GB/s inside one way, Gb/s between one way: of one JAX device, from the data sheets.
KNOWN = [
    ("a100-80gb", 312, 80, 2.039, 300, 200),
    ("h100", 989, 80, 3.35, 450, 400),
    ("h200", 989, 141, 4.8, 450, 400),
    ("b200", 2250, 180, 8.0, 900, 400),
    ("gb200", 2500, 186, 8.0, 900, 400),
    ("b300", 2250, 268, 8.0, 900, 800),
    ("gb300", 2500, 268, 8.0, 900, 800),
    ("rtx3090", 71, 24, 0.936, 31.5, 12.5),
    ("rtx4090", 165.2, 24, 1.008, 31.5, 12.5),
    ("rtx5090", 209.5, 32, 1.792, 64, 12.5),
    ("rtxa6000", 154.8, 48, 0.768, 31.5, 12.5),
    ("v4", 275, 32, 1.228, 50, 50),
    ("v5e", 197, 16, 0.819, 50, 25),
    ("v6e", 918, 32, 1.638, 100, 100),
    ("v7", 2307 / 2, 192 / 2, 7.38 / 2, 100 / 2, 100 / 2),
    ("v3", 123 / 2, 32 / 2, 0.9 / 2, 83 / 2, 25 * 8 / 16),
]


@pytest.mark.parametrize(("name", "peak", "gib", "rate", "inside", "between"), KNOWN, ids=lambda x: str(x))
def test_data_sheets(name: str, peak: float, gib: float, rate: float, inside: float, between: float) -> None:
    chip = chip_named(name)
    assert chip.inside and chip.between
    assert chip.peak_flops["bf16"] == pytest.approx(peak * TERA)
    assert chip.memory_bytes == pytest.approx(gib * 2**30)
    assert chip.memory_bytes_per_second == pytest.approx(rate * TERA)
    assert chip.inside.bytes_per_second == pytest.approx(inside * 1e9)
    assert chip.between.bytes_per_second == pytest.approx(between * 1e9 / 8, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "gib"), [("v3", 15.48), ("v4", 30.75), ("v5e", 15.75), ("v5p", 95.73), ("v6e", 31.24), ("v7", 94.74)]
)
def test_the_usable_memory_of_a_tpu_is_that_of_its_compiler(name: str, gib: float) -> None:
    assert chip_named(name).usable_bytes == int(gib * 2**30)


@pytest.mark.parametrize("name", ["v100-32gb", "t4"])
def test_chips_before_ampere_have_no_bf16(name: str) -> None:
    with pytest.raises(SpanaxError, match=f"'{name}' does not compute in bf16"):
        chip_named(name).flops_per_second("bf16")


def test_chips_without_rates() -> None:
    assert chip_named("v5e").flops_per_second("fp16") == chip_named("v5e").flops_per_second("fp32")
    with pytest.raises(SpanaxError, match="rates are not known"):
        Chip("x").flops_per_second("bf16")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU7x", "v7"),
        ("cpu", "cpu"),
    ],
)
def test_by_what_jax_calls_it(kind: str, name: str) -> None:
    assert chip_of_kind(kind).name == name


def test_an_unknown_kind_has_no_numbers() -> None:
    chip = chip_of_kind("NVIDIA H100 PCIe")
    assert (chip.name, chip.inside, chip.memory_bytes, dict(chip.peak_flops)) == ("NVIDIA H100 PCIe", None, None, {})


# ---- a table of one's own


def test_the_smallest_table() -> None:
    chip = read_chip("mine", SMALLEST, "mine.toml", {})
    assert chip.peak_flops == {"bf16": 100e12} and chip.usable_bytes == chip.memory_bytes == 16 * 2**30
    assert chip.inside is None and chip.sources["memory_bytes"] == "as written in mine.toml"


def test_a_cluster_file_inherits_missing_keys_by_like(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "a100"\nshape = "2x4"\nmemory_rate = "1.9 TB/s"\npeak = { bf16 = "300 TFLOP/s" }\n'
        '[inside]\nshare = "50 %"\n[between]\nrate = "100 Gb/s"\n[source]\n"between" = "our network"\n'
    )
    chip, shape = read_file(path)
    like = chip_named("a100")
    assert (chip.name, shape) == ("mine", "2x4")
    assert chip.inside and chip.between and like.inside and like.between
    assert chip.memory_bytes_per_second == 1.9e12 and chip.peak_flops == {**like.peak_flops, "bf16": 300e12}
    assert (chip.inside.share, chip.inside.bytes_per_second) == (0.5, like.inside.bytes_per_second)
    assert (chip.between.bytes_per_second, chip.between.share) == (12.5e9, like.between.share)
    assert chip.sources["memory_bytes_per_second"] == chip.sources["inside.share"] == f"as written in {path}"
    assert chip.sources["between.bytes_per_second"] == "our network"
    assert chip.sources["between.share"] == like.sources["between.share"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"memory": "16"}, "memory = '16' has no unit"),
    ({"memory_rate": "1 TB"}, "memory_rate = '1 TB': 'TB' is not a unit of bytes per second"),
    ({"memory": "16 PiB"}, "memory = '16 PiB' is not plausible: 1 MiB to 10 TiB"),
    ({"usable_memory": "17 GiB"}, "usable_memory = '17 GiB' is more than memory = '16 GiB'"),
    ({"memroy": "16 GiB"}, "unknown key 'memroy'"),
    ({"peak": "100 TFLOP/s"}, "peak = '100 TFLOP/s' is not a table"),
    ({"peak": {"bfloat16": "1 TFLOP/s"}}, "unknown key 'peak.bfloat16'"),
    ({"inside": {"kind": "ring", "rate": "1 GB/s"}}, "inside.kind = 'ring' is unknown"),
    ({"inside": {"kind": "switch"}}, "'inside.rate' is missing"),
    ({"inside": {"kind": "torus", "rate": "1 GB/s"}}, "'inside.shape' is missing"),
    ({"inside": {"rate": "1 GB/s", "devices": 0}}, "inside.devices = 0 is not an integer >= 1"),
    ({"inside": {"kind": "torus", "rate": "1 GB/s", "shape": [4, 0]}}, "inside.shape = [4, 0] is not a shape"),
    ({"inside": {"rate": "1 GB/s", "speed": "1 GB/s"}}, "unknown key 'inside.speed'"),
    ({"source": {"speed": "x"}}, "unknown key 'source.speed'"),
    ({"shared": "yes"}, "shared = 'yes' is not a flag"),
    ({"like": "h1000"}, "like = 'h1000': there is no such chip"),
]


@pytest.mark.parametrize(("table", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_an_invalid_value_raises(table: dict[str, Any], message: str) -> None:
    with pytest.raises(SpanaxError) as caught:
        read_chip("mine", SMALLEST | table, "mine.toml", {})
    assert str(caught.value).startswith(message) and "where: mine.toml" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("key", SMALLEST)
def test_missing_keys_raise(key: str) -> None:
    with pytest.raises(SpanaxError, match=f"'{key}' is missing"):
        read_chip("mine", {k: v for k, v in SMALLEST.items() if k != key}, "mine.toml", {})


def test_no_file_and_no_toml(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the cluster file"):
        read_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("memory = 16 GiB")
    with pytest.raises(DataError, match="is not TOML"):
        read_file(tmp_path / "bad.toml")
    (tmp_path / "shape.toml").write_text('like = "h100"\nshape = [8, 8]\n')
    with pytest.raises(SpanaxError, match="shape = .8, 8. is not a string"):
        read_file(tmp_path / "shape.toml")
