"""docs/hardware.md: its examples run, its names and its cluster file are read, its keys are those that are read."""

import doctest
import re
from pathlib import Path

from spanax.hardware.chips import CHIP_KEYS, DTYPE_KEYS, LINK_KEYS
from spanax.hardware.cluster import cluster

PAGE = Path(__file__).parent.parent.parent / "docs" / "hardware.md"


def test_the_examples_run() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried and not failed


def test_the_cluster_names_on_the_page_are_valid() -> None:
    names = re.findall(
        r"^\| ((?:`[^`]+`(?:, )?)+) \| ", PAGE.read_text().partition("## Memory of a GPU")[0], re.MULTILINE
    )
    read = [name for cell in names for name in re.findall(r"`([^`]+)`", cell) if ".toml" not in name]
    assert len(read) >= 10
    for name in read:
        assert cluster(name).num_devices >= 1


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
