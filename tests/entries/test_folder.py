"""Entries of a run folder: only regular files, without links in their path; other entries are not changed."""

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from spanax.entries import kind as kinds
from spanax.entries.folder import MAX_DEPTH, TEMPORARY, Folder
from spanax.entries.kind import Kind
from spanax.entries.names import CONFIG, EVENTS, FILES, HEARTBEAT, MANIFEST, Name
from spanax.errors import EntryError, SpanaxError

BEAT = HEARTBEAT.of(0)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder outside of the run, which must not be read or changed."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "0.json").write_text("precious")
    (folder / "file").write_text("precious")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    folder = Folder.of(tmp_path / "run").make()
    folder.make("heartbeats")
    return folder


def sparse(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 32)


def a_socket(path: Path, outside: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)
    os.chdir(before)


PUT: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "dangling link": lambda path, outside: path.symlink_to(outside / "new"),
    "link to a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "FIFO": lambda path, outside: os.mkfifo(path),
    "folder": lambda path, outside: path.mkdir(),
    "socket": a_socket,
    "hard link": lambda path, outside: os.link(outside / "file", path),
    "sparse file": sparse,
}
SAYS = {"link": "a symbolic link", "dangling link": "a symbolic link", "link to a folder": "a symbolic link",
        "link to a device": "a symbolic link", "FIFO": "a FIFO", "folder": "a folder", "socket": "a socket",
        "hard link": "has another name", "sparse file": "4,294,967,296 bytes"}  # fmt: skip


def test_touching_refuses_hard_links_and_creates_nothing(run: Folder, outside: Path) -> None:
    before = snapshot(outside)
    run.touch(CONFIG)
    os.link(outside / "file", run.path / EVENTS)
    with pytest.raises(EntryError, match="has another name"):
        run.touch(EVENTS)
    run.replace(CONFIG, [])
    os.utime(run.path / CONFIG, (0, 0))
    run.touch(CONFIG)
    assert run.path.joinpath(str(CONFIG)).stat().st_mtime > 0 and snapshot(outside) == before


def append(folder: Folder, name: Name) -> None:
    with folder.appending(name) as descriptor:
        os.write(descriptor, b"more")


@pytest.mark.parametrize("name", [CONFIG, BEAT])
@pytest.mark.parametrize("put", PUT)
@pytest.mark.parametrize("act", ["read", "replace", "append", "lines"])
def test_only_regular_files_are_opened(put: str, act: str, name: Name, run: Folder, outside: Path) -> None:
    before = snapshot(outside)
    PUT[put](run.path / name, outside)
    acts: dict[str, Callable[[], object]] = {
        "read": lambda: run.read(name),
        "replace": lambda: run.replace(name, ["new"]),
        "append": lambda: append(run, name),
        "lines": lambda: list(run.lines(name)),
    }
    is_fine = {("hard link", "read"), ("hard link", "lines"), ("hard link", "replace")}
    is_fine |= {("sparse file", "replace"), ("sparse file", "append")}
    if (put, act) in is_fine:
        acts[act]()
    else:
        with pytest.raises(EntryError, match=SAYS[put]) as error:
            acts[act]()
        assert f"'{name}'" in str(error.value) and error.value.exit_code == 65 and "fix: " in str(error.value)
    assert snapshot(outside) == before
    assert [name for name in run.names() if name.endswith(".new")] == []


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.iterdir())
    }


@pytest.mark.parametrize("act", ["read", "replace", "append", "kind", "names", "touch", "remove", "make", "walk"])
def test_a_folder_that_is_a_link_is_not_entered(act: str, run: Folder, outside: Path) -> None:
    before = snapshot(outside)
    run.remove_if_empty("heartbeats")
    os.symlink(outside, run.path / "heartbeats")
    acts: dict[str, Callable[[], object]] = {
        "read": lambda: run.read(BEAT),
        "replace": lambda: run.replace(BEAT, ["new"]),
        "append": lambda: append(run, BEAT),
        "kind": lambda: run.kind(BEAT),
        "names": lambda: run.inner("heartbeats").names(),
        "touch": lambda: run.touch(BEAT),
        "remove": lambda: run.remove(BEAT),
        "make": lambda: run.make("heartbeats/inner"),
        "walk": lambda: list(run.inner("heartbeats").walk()),
    }
    with pytest.raises(EntryError, match="'heartbeats' is a symbolic link, and has to be a folder") as error:
        acts[act]()
    assert f"it leads to {outside}" in str(error.value)
    assert snapshot(outside) == before


def test_deleting_removes_links_and_not_their_targets(run: Folder, outside: Path) -> None:
    before = snapshot(outside)
    os.symlink(outside, run.path / "checkpoints")
    (run.path / "tree" / "inner").mkdir(parents=True)
    os.symlink(outside, run.path / "tree" / "inner" / "out")
    os.symlink(outside / "file", run.path / "tree" / "file")
    with pytest.raises(EntryError, match="'checkpoints' is a symbolic link"):
        run.remove_folder("checkpoints")
    run.remove_folder("tree")
    run.remove_folder("tree")
    run.remove("checkpoints")
    run.remove("checkpoints")
    assert run.names() == ["heartbeats"] and snapshot(outside) == before


def test_the_path_of_the_user_may_be_a_link(run: Folder, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(run.path)
    linked = Folder.of(tmp_path / "here")
    linked.replace(CONFIG, ["steps = 4"])
    assert run.read(CONFIG) == b"steps = 4" and linked.resolved() == run
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert Folder.of(tmp_path / "loop").kind() is None


def test_a_folder_is_created_if_its_parent_exists(tmp_path: Path) -> None:
    folder = Folder.of(tmp_path / "a" / "run")
    with pytest.raises(FileNotFoundError):
        folder.make("heartbeats")
    assert folder.inner("checkpoints", "4").make() == folder.inner("checkpoints", "4")
    assert folder.make("heartbeats").names() == [] and folder.names() == ["checkpoints", "heartbeats"]
    with pytest.raises(FileExistsError):
        folder.inner("heartbeats").make_new()


def test_a_missing_entry_is_not_refused(run: Folder, tmp_path: Path) -> None:
    for folder in (run, Folder.of(tmp_path / "nowhere"), run.inner("nowhere")):
        assert folder.kind(CONFIG) is None and list(folder.lines(EVENTS)) == []
        with pytest.raises(FileNotFoundError):
            folder.read(CONFIG)
    assert Folder.of(tmp_path / "nowhere").names() == [] == run.inner("nowhere").names()


def test_a_replaced_file_is_the_old_one_or_the_new_one(run: Folder) -> None:
    run.replace(CONFIG, ["old"])

    def cut_short() -> object:
        yield "new"
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        run.replace(CONFIG, cut_short())  # type: ignore[arg-type]
    assert run.read(CONFIG) == b"old" and run.names() == ["config.toml", "heartbeats"]


def test_a_temporary_file_is_created_exclusively(run: Folder, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is random, and what has it already is not followed."""
    before, names = snapshot(outside), set()
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda name, *rest, **how: (names.add(name), rename(name, *rest, **how)))
    for _ in range(8):
        run.replace(CONFIG, ["new"])
    assert len(names) == 8 and all(TEMPORARY.fullmatch(name) for name in names)
    monkeypatch.setattr(secrets, "token_hex", lambda size: "a" * 2 * size)
    (run.path / f".{CONFIG}.{'a' * 16}.new").symlink_to(outside / "file")
    with pytest.raises(FileExistsError):
        run.replace(CONFIG, ["newer"])
    assert run.read(CONFIG) == b"new" and snapshot(outside) == before


def test_temporaries_of_a_killed_process_are_swept(run: Folder, outside: Path) -> None:
    (run.path / f".config.toml.{'a' * 16}.new").write_text("half")
    (run.path / f".config.toml.{'b' * 16}.new").symlink_to(outside / "file")
    (run.path / ".mine.new").write_text("mine")
    run.sweep()
    assert run.names() == [f".config.toml.{'b' * 16}.new", ".mine.new", "heartbeats"]


def test_a_path_for_a_library_holds_folders_and_regular_files(run: Folder, outside: Path) -> None:
    (run.path / "wandb" / "run-1").mkdir(parents=True)
    (run.path / "wandb" / "latest-run").symlink_to("run-1")
    assert run.inner("wandb").checked_path(may_link_inside=True) == run.path / "wandb"
    with pytest.raises(EntryError, match="'wandb/latest-run' is a symbolic link"):
        run.inner("wandb").checked_path()
    for target in (outside, "../outside", "run-1/../../../outside"):
        (run.path / "wandb" / "out").symlink_to(target)
        with pytest.raises(EntryError, match="'wandb/out' is a symbolic link"):
            run.inner("wandb").checked_path(may_link_inside=True)
        run.remove("wandb/out")
    os.mkfifo(run.path / "wandb" / "run-1" / "log")
    with pytest.raises(EntryError, match="'wandb/run-1/log' is a FIFO"):
        run.inner("wandb").checked_path(may_link_inside=True)


def test_folders_nested_without_end_are_refused(run: Folder) -> None:
    (run.path / "/".join("d" * (MAX_DEPTH + 1))).mkdir(parents=True)
    with pytest.raises(EntryError, match=f"nested deeper than {MAX_DEPTH}"):
        list(run.walk())


@pytest.mark.parametrize("name", ["..", "../x", "/etc/passwd", "a/../../b", "a\0b", "."])
def test_a_name_outside_of_the_folder_raises(name: str, run: Folder) -> None:
    for act in (run.kind, run.make, run.remove, run.inner):
        with pytest.raises(ValueError, match="is not the name of an entry"):
            act(name)


def test_a_system_without_descriptors_of_folders_is_refused(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "SUPPORTED", False)
    with pytest.raises(SpanaxError, match="this system cannot open files relative to a folder"):
        run.read(CONFIG)


def test_every_name_is_bounded_and_listed_once() -> None:
    assert len(FILES) == len(set(FILES)) and all(name.max_bytes > 0 for name in FILES)
    assert HEARTBEAT.value("heartbeats/12.json") == "12" and HEARTBEAT.value("heartbeats/a/b.json") is None
    assert f"checkpoints/*/{MANIFEST}" in FILES and Kind.of(0o100644) is Kind.FILE
