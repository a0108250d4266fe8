"""The cache of compiled programs: its folder, its size, and that a second run compiles nothing."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from spanax.train.compilation_cache import FOLDER, THRESHOLD, enable_compilation_cache, prune
from spanax.train.data.cache import cache_folder, untrusted


def test_the_least_recently_used_entries_are_removed(tmp_path: Path) -> None:
    for index, name in enumerate(("old", "read", "new")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 + index, 1000 + index))
    os.utime(tmp_path / "read", (2000, 1001))
    prune(tmp_path, 300)
    assert len(list(tmp_path.iterdir())) == 3
    prune(tmp_path, 200)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "read"]
    prune(tmp_path, 150)
    assert [path.name for path in tmp_path.iterdir()] == ["read"]


def test_an_explicit_cache_folder_and_threshold_are_not_changed(tmp_path: Path) -> None:
    for folder in (str(tmp_path / "elsewhere"), "gs://bucket/cache", ""):
        output = {FOLDER: folder, "XDG_CACHE_HOME": str(tmp_path)}
        for threshold, retained in (({}, "0"), ({THRESHOLD: "2"}, "2")):
            environ = output | threshold
            enable_compilation_cache(environ)
            assert environ == output | {THRESHOLD: retained} and not list(tmp_path.iterdir())


def test_a_read_only_home_folder_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "spanax").write_text("a file where the folder would be")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with pytest.warns(UserWarning, match="compiled programs are not cached in .*: it is not writable"):
        enable_compilation_cache(environ)
    assert environ == {"XDG_CACHE_HOME": str(tmp_path)}


def test_no_program_is_loaded_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for home in ("", "relative"):
        environ = {"XDG_CACHE_HOME": home}
        with pytest.warns(UserWarning, match="not an absolute path") if home else nullcontext():
            enable_compilation_cache(environ)
        assert environ[FOLDER] == str(tmp_path / "home" / ".cache" / "spanax" / "compiled")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("where", "mode"), [("", 0o777), ("spanax", 0o777), ("spanax/compiled", 0o777), ("spanax", 0o1777)]
)
def test_no_program_is_loaded_from_a_folder_others_can_write(
    where: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cache"
    (home / "spanax" / "compiled").mkdir(parents=True)
    (home / where).chmod(mode)  # who may not delete may still add
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    environ = {"XDG_CACHE_HOME": str(home)}
    with pytest.warns(UserWarning, match="every user can write to '"):
        enable_compilation_cache(environ)
    assert environ.get(FOLDER) != str(home / "spanax" / "compiled")
    if mode & 0o1000:
        return  # the folder itself is its owner's
    environ = {FOLDER: str(home / "spanax" / "compiled")}
    with pytest.warns(UserWarning, match=f"{FOLDER}=.* is not used: every user can write to '"):
        enable_compilation_cache(environ)
    assert environ[FOLDER] == str(tmp_path / "home" / ".cache" / "spanax" / "compiled")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spanax").mkdir()
    os.chown(tmp_path / "spanax", 12345, -1)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert cache_folder() == tmp_path / "home" / ".cache" / "spanax"
    (tmp_path / "home").mkdir(mode=0o777)
    (tmp_path / "home").chmod(0o777)
    with pytest.warns(UserWarning) as warnings:
        folder = cache_folder()
    assert len(warnings) == 2 and not untrusted(folder) and folder.stat().st_mode & 0o077 == 0


WORKLOAD = """
import jax, spanax
from flax import nnx

batch = {"x": jax.ShapeDtypeStruct((4, 8), "float32")}
rows = [{"x": [0.5] * 8}] * 64
tiny = spanax.Workload(build=lambda rngs: nnx.Linear(8, 8, rngs=rngs), batch=batch, source=rows, validation=rows,
                       loss=lambda model, batch: (model(batch["x"]) ** 2).mean(), num_steps=2)
"""


def test_the_second_run_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(WORKLOAD)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_PERSISTENT", FOLDER))}
    retained = []
    for name in ("one", "two"):
        subprocess.run(
            [sys.executable, "-m", "spanax", "train", "tiny.py:tiny", "--devices", "2", "--output-dir", name],
            cwd=tmp_path, env=environ | {"XDG_CACHE_HOME": str(tmp_path)}, check=True, timeout=300,
        )  # fmt: skip
        retained.append({path.name for path in (tmp_path / "spanax" / "compiled").iterdir()})
    assert len(retained[0]) > 4 and retained[1] == retained[0]
