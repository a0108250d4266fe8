"""The manifest: finds every difference, follows no link out of its folder, and starts no JAX."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from spanax.entries.folder import Folder
from spanax.errors import WriteError
from spanax.train.store import manifest, view

FILES = {
    "plan.json": b'{"layout": "fsdp"}',
    "meta.json": b'{"saved_at": "2026-01-01T00:00:00+00:00", "leaves": {}, "meta": {}}',
    "arrays/state/d/0": bytes(range(256)) * 9,
    "arrays/_METADATA": b"x",
    "arrays/empty": b"",
}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "40"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest.write(folder)
    return folder


def test_a_finished_step_has_no_problems(step: Path) -> None:
    assert manifest.problems(step) == []
    assert manifest.steps(step.parent) == [40] and manifest.unfinished(step.parent) == []
    assert sorted(json.loads((step / "manifest.json").read_bytes())["files"]) == sorted(FILES)
    assert not list(step.glob("*.tmp"))


@pytest.mark.parametrize(
    "name, content, reported",
    [
        ("plan.json", b'{"layout": "fsdq"}', "plan.json: checksum differs"),
        ("plan.json", b'{"layout": "fsdp"} ', "plan.json: size differs, 18 B saved, 19 B now"),
        ("plan.json", None, "plan.json: missing"),
        ("arrays/empty", b"1", "arrays/empty: size differs"),
        ("arrays/state/d/1", b"", "arrays/state/d/1: extra"),
        ("manifest.json", b"", "manifest.json: damaged"),
        ("manifest.json", b"[" * 100_000, "manifest.json: damaged"),
        ("manifest.json", b'{"step": ' + b"9" * 10_000 + b"}", "manifest.json: damaged"),
        ("manifest.json", None, "manifest.json: missing"),
    ],
)
def test_each_difference_names_its_file(step: Path, name: str, content: bytes | None, reported: str) -> None:
    if content is None:
        (step / name).unlink()
    else:
        (step / name).write_bytes(content)
    (problem,) = manifest.problems(step)
    assert problem.startswith(reported)


def test_every_bit_and_length_of_the_manifest_counts(step: Path) -> None:
    path = step / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << random.Random(place).randrange(8)
        path.write_bytes(flipped)
        assert manifest.problems(step), f"byte {place}"
        path.write_bytes(content[:place])
        assert manifest.problems(step), f"cut to {place} bytes"
    path.write_bytes(content)
    assert manifest.problems(step) == []


def rewritten(step: Path, /, **changes: object) -> None:
    """A manifest whose own checksum is right but whose content is another."""
    content = json.loads((step / "manifest.json").read_bytes())
    del content["crc32"]
    (step / "manifest.json").write_bytes(manifest._render({**content, **changes}))


def test_a_manifest_cannot_name_files_outside(step: Path) -> None:
    (step.parent / "secret").write_bytes(b"x")
    entry = {"size": 1, "crc32": "8cdc1683"}
    files = json.loads((step / "manifest.json").read_bytes())["files"]
    rewritten(step, files={**files, "../secret": entry, "/etc/passwd": entry})
    assert manifest.problems(step) == [
        "../secret: leaves the folder, refused",
        "/etc/passwd: leaves the folder, refused",
    ]


@pytest.mark.parametrize(
    "changes, reported",
    [
        ({"step": 41}, "manifest.json: written for step 41, found in folder 40"),
        ({"format": 2}, "manifest.json: format 2 is not supported"),
        ({"files": ["plan.json"]}, "manifest.json: its list of files is invalid"),
        ({"files": {"plan.json": 3}}, "plan.json: its manifest entry is invalid"),
    ],
)
def test_a_manifest_that_was_not_written_for_this_folder(step: Path, changes: dict, reported: str) -> None:
    rewritten(step, **changes)
    assert reported in manifest.problems(step)


def test_links_and_special_files_are_refused(step: Path) -> None:
    outside = step.parent / "outside"
    (step / "plan.json").rename(outside)
    (step / "plan.json").symlink_to(outside)
    os.mkfifo(step / "arrays" / "pipe")
    (step / "inside").symlink_to(step.parent)
    assert manifest.problems(step) == [
        "arrays/pipe: not a plain file, refused",
        "inside: symbolic link, refused",
        "plan.json: symbolic link, refused",
        "plan.json: missing",
    ]
    with pytest.raises(WriteError, match="symbolic link"):
        manifest.write(step)
    (step / "manifest.json").unlink()
    os.mkfifo(step / "manifest.json")
    assert manifest.problems(step) == [
        "manifest.json: '40/manifest.json' is a FIFO, and has to be a regular file.",
    ]


def test_a_linked_step_is_ignored_and_never_removed(step: Path) -> None:
    link = step.parent / "50"
    link.symlink_to(step)
    assert manifest.steps(step.parent) == [40] and paths(manifest.unfinished(step.parent)) == [link]
    assert manifest.problems(link) == ["50: symbolic link, refused"]
    manifest.clear(step.parent)
    assert link.is_symlink() and manifest.problems(step) == []


def test_only_plain_numbers_are_steps(tmp_path: Path) -> None:
    for name in ["7", "07", "-7", "7.old", "+7", "٧", "9" * 19, "logs"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"")
    (tmp_path / "8").write_bytes(b"a file")
    (tmp_path / "9").mkdir()
    assert manifest.steps(tmp_path) == [7]
    assert [path.name for path in manifest.unfinished(tmp_path)] == ["8", "9"]
    with pytest.raises(WriteError, match="its name is not a step number"):
        manifest.write(tmp_path / "logs")


def test_clear_removes_dead_saves_and_nothing_else(step: Path) -> None:
    root = step.parent
    for name in [
        "41/arrays.orbax-checkpoint-tmp/x",
        "42/plan.json",
        f"42/.manifest.json.{'a' * 16}.new",
        "43.new0/meta.json",
        "44/",
    ]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch() if not name.endswith("/") else (root / name).mkdir()
    (root / "2024").mkdir()
    (root / "2024" / "holiday.jpg").touch()
    (root / "metrics.jsonl").touch()
    manifest.clear(root)
    assert sorted(path.name for path in root.iterdir()) == ["2024", "40", "metrics.jsonl"]


def test_a_partially_removed_step_is_not_a_step(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(_: str, *, dir_fd: int) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(manifest, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(shutil, "rmtree", stuck)
    with pytest.raises(OSError, match="busy"):
        manifest.discard(step)
    assert manifest.steps(step.parent) == [] and manifest.unfinished(step.parent) == []
    assert view.describe(step.parent) == []
    monkeypatch.undo()
    manifest.clear(step.parent)
    assert not list(step.parent.iterdir())


def test_removal_outlasts_files_that_come_back(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmtree, late = shutil.rmtree, iter([True, True])

    def raced(name: str, *, dir_fd: int) -> None:
        if next(late, False):
            raise OSError(39, "Directory not empty")
        rmtree(name, dir_fd=dir_fd)

    monkeypatch.setattr(shutil, "rmtree", raced)
    manifest.discard(step)
    assert not step.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks descriptors up in /proc")
def test_everything_is_on_disk_before_the_manifest_appears(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda *names, **folders: (done.append("rename"), rename(*names, **folders)))
    manifest.write(step)
    before, after = done[: done.index("rename")], done[done.index("rename") + 1 :]
    everything = {str(path) for path in step.rglob("*") if path.name != "manifest.json"}
    assert set(before) >= everything
    assert any(re.fullmatch(rf"{step}/\.manifest\.json\.[0-9a-f]{{16}}\.new", name) for name in before)
    assert after == [str(step), str(step.parent)]


def paths(folders: Iterable[Folder]) -> list[Path]:
    return [folder.path for folder in folders]


def copied(step: Path, name: str) -> Path:
    return Path(shutil.copytree(step, step.parent / name))


def test_a_finished_successor_takes_over_its_number(step: Path) -> None:
    new = copied(step, "40.new7")
    (new / "plan.json").write_bytes(b"newer")
    manifest.write(new)
    assert paths(folder for _, folder in manifest.finished(step.parent)) == [step, new]
    manifest.settle(step.parent)
    assert (step / "plan.json").read_bytes() == b"newer" and manifest.problems(step) == [] and not new.exists()


def test_a_damaged_successor_does_not_replace_an_intact_step(step: Path) -> None:
    new = copied(step, "40.new7")
    (new / "plan.json").write_bytes(b"damaged")
    manifest.settle(step.parent)
    assert manifest.problems(step) == [] and not new.exists()
    step.rename(new)
    (new / "plan.json").write_bytes(b"damaged")
    manifest.settle(step.parent)
    assert manifest.problems(step)[0].startswith("plan.json: size differs")


def test_describe_and_verify_report_good_bad_and_unfinished_steps(step: Path) -> None:
    bad = copied(step, "41")
    (bad / "plan.json").unlink()
    (step.parent / "42").mkdir()
    meta = {"saved_at": "2026-01-01T00:00:00+00:00", "leaves": {"w": "float32[2]"}, "meta": {"loss": 2.5}}
    (step / "meta.json").write_text(json.dumps(meta))
    manifest.write(step)
    good, damaged, cut_short = view.describe(step.parent)
    assert (good.step, good.state, good.problems, good.num_leaves, good.meta) == (40, "good", (), 1, {"loss": 2.5})
    assert good.when == meta["saved_at"] and good.bytes > 2000
    assert (damaged.step, damaged.state, damaged.problems) == (
        41,
        "bad",
        ("manifest.json: written for step 40, found in folder 41",),
    )
    assert (cut_short.step, cut_short.state) == (42, "unfinished")
    lines = view.verify(step.parent)
    assert [line.split(":")[0] for line in lines] == ["step 41", "step 42"]


# What the package itself imports is not the matter here.
NO_JAX = """
import importlib.util, sys, types
package = types.ModuleType("spanax")
package.__path__ = importlib.util.find_spec("spanax").submodule_search_locations
sys.modules["spanax"] = package
from spanax.train.store import checkpoint
print(checkpoint.verify(sys.argv[1]), len(checkpoint.describe(sys.argv[1])))
print([name for name in ("jax", "numpy", "orbax") if name in sys.modules])
"""


def test_reading_checkpoints_imports_no_jax(step: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NO_JAX, str(step.parent)], capture_output=True, text=True, timeout=240)
    assert done.stdout == "[] 1\n[]\n", done.stderr
