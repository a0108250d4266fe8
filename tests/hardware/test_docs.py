"""docs/hardware.md: its table is the catalogue's, its examples run, its keys are those that are read."""

import doctest
import os
import re
from pathlib import Path

from spanax.hardware.chip import Chip, Link
from spanax.hardware.chips import CHIP_KEYS, DTYPE_KEYS, LINK_KEYS, catalogue
from spanax.hardware.cluster import cluster
from spanax.hardware.slices import shape_text
from spanax.units import bytes_text, quantity_text

PAGE = Path(__file__).parent.parent.parent / "docs" / "hardware.md"
BEGIN, END = "test_docs.py -->\n", "<!-- end -->"
HEAD = ["chip", "bf16", "float32", "fp8 / int8", "memory, usable", "memory rate", "inside", "between", "largest"]


def rate_text(value: float | None, kind: str, share: float = 1.0) -> str:
    if value is None:
        return "-"
    return quantity_text(value, kind) + (f" x {quantity_text(share, 'share', 3)}" if share != 1 else "")


def link_text(link: Link | None) -> str:
    if link is None:
        return "-"
    return f"{link.name} {rate_text(link.bytes_per_second, 'bytes per second', link.share)}"


def row(chip: Chip) -> list[str]:
    """What the table says of one chip."""

    def peak(dtype: str) -> str:
        return rate_text(chip.peak_flops.get(dtype), "operations per second", chip.matmul_shares.get(dtype, 1.0))

    memory = " , ".join(bytes_text(size) for size in (chip.memory_bytes, chip.usable_bytes) if size) or "the host's"
    link = chip.inside
    largest = shape_text(link.max_shape) if link and link.max_shape else str(link and link.max_devices or "-")
    return [
        f"`{chip.name}`",
        peak("bf16") if "bf16" in chip.peak_flops else f"none; fp16: {peak('fp16')}",
        peak("fp32"),
        f"{peak('fp8')} / {peak('int8')}" if {"fp8", "int8"} & set(chip.peak_flops) else "-",
        memory.replace(" ,", ","),
        rate_text(chip.memory_bytes_per_second, "bytes per second", chip.memory_share),
        link_text(link),
        link_text(chip.between),
        largest,
    ]


def table() -> str:
    rows = [HEAD, ["---"] * len(HEAD), *(row(chip) for chip in catalogue().values())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def test_the_table_is_the_catalog() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    result, after = rest.split(END)
    if os.environ.get("SPANAX_GOLDEN") == "update":
        PAGE.write_text(before + BEGIN + table() + END + after)
        result = table()
    assert result == table(), "chips.toml changed: make golden"


def test_the_examples_run() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried >= 5 and not failed


def test_the_cluster_names_on_the_page_are_valid() -> None:
    names = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \| ", PAGE.read_text().partition("## The catalog")[0], re.MULTILINE)
    read = [name for cell in names for name in re.findall(r"`([^`]+)`", cell) if ".toml" not in name]
    assert len(read) >= 10
    for name in read:
        assert cluster(name).num_devices > 1


def test_the_cluster_file_is_read(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block
    (tmp_path / "mine.toml").write_text(block[1])
    actual = cluster(str(tmp_path / "mine.toml"))
    assert (actual.num_devices, actual.memory_bytes) == (128, 76 * 2**30)
    assert actual.chip.between and actual.chip.between.name == "efa"
    assert actual.chip.sources["between.latency_seconds"] == "nccl-tests, May"


def test_every_key_is_documented() -> None:
    page = PAGE.read_text().partition("## A cluster file")[2].partition("## The link of a mesh axis")[0]
    for key in (*CHIP_KEYS, *DTYPE_KEYS, "inside", "between", *(f".{key}" for key in LINK_KEYS)):
        assert f"`{key}`" in page, key
