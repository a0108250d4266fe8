"""Versions, settings and folders that the doctor must object to."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spanax.doctor import machine
from spanax.doctor.machine import Installed, installed_packages

NEEDS = {
    "spanax": ["jax<0.13,>=0.10.2", "flax>=0.12.8", 'libtpu>=0.0.51; extra == "tpu"'],
    "jax": ["jaxlib<=0.10.2,>=0.10.1", 'jaxlib==0.10.1; extra == "ci"'],
    "flax": ["jax>=0.10.0"],
}
GOOD = {"spanax": "0.1.0.dev0", "jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"}


def shelf(**changes: str | None) -> Installed:
    versions = {name.replace("_", "-"): version for name, version in (GOOD | changes).items() if version is not None}
    return {
        name: SimpleNamespace(version=version, requires=NEEDS.get(name))  # type: ignore[misc]
        for name, version in versions.items()
    }


def test_this_environment_passes() -> None:
    installed = installed_packages()
    result = [machine.packages(installed), machine.plugins(installed)]
    assert [item.state for item in result] == ["ok"] * 2, result
    assert "jax 0.1" in result[0].what


def test_matching_packages_pass() -> None:
    assert machine.packages(shelf()).state == machine.plugins(shelf()).state == "ok"
    assert machine.packages(shelf(jaxlib="0.10.2.dev3")).state == "ok"


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        (
            {"jax": "0.9.1"},
            "spanax needs jax<0.13,>=0.10.2, but 0.9.1 is installed.",
            "pip install 'jax<0.13,>=0.10.2'",
        ),
        ({"jax": "0.13.0.dev1"}, "but 0.13.0.dev1 is installed", "jax<0.13"),
        ({"jaxlib": "0.10.0"}, "jax needs jaxlib<=0.10.2,>=0.10.1, but 0.10.0 is installed.", "'jaxlib<=0.10.2,>=0.1"),
        ({"flax": None}, "spanax needs flax>=0.12.8, but none is installed.", "pip install 'flax>=0.12.8'"),
    ],
)
def test_versions_that_do_not_go_together(changes: dict[str, str | None], what: str, fix: str) -> None:
    verdict = machine.packages(shelf(**changes))
    assert verdict.state == "problem" and what in verdict.what and fix in verdict.fix, verdict


def test_a_spanax_that_is_not_installed() -> None:
    verdict = machine.packages(shelf(spanax=None))
    assert verdict.state == "warning" and verdict.fix == "pip install spanax"


def test_a_plugin_of_another_jaxlib() -> None:
    good = machine.plugins(shelf(jax_cuda12_plugin="0.10.2", jax_cuda12_pjrt="0.10.2", libtpu="0.0.51"))
    assert good.state == "ok" and "libtpu 0.0.51" in good.what
    verdict = machine.plugins(shelf(jax_cuda12_plugin="0.10.2", jax_cuda12_pjrt="0.9.0"))
    assert verdict.state == "problem" and "jax-cuda12-pjrt 0.9.0 is incompatible with jaxlib 0.10.2" in verdict.what
    assert verdict.fix == "pip install jax-cuda12-pjrt==0.10.2 jax-cuda12-plugin==0.10.2"


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"NPROC": "2"}, "NPROC=2: simulated devices may deadlock"),
        ({"NPROC": "many"}, "NPROC=many"),
        ({"https_proxy": "http" + "://proxy:3128"}, "a proxy is set"),
    ],
)
def test_harmful_environment_settings_are_reported(environ: dict[str, str], what: str) -> None:
    verdicts = machine.settings(environ, is_group=True)
    assert [item.state for item in verdicts] == ["warning"] and what in verdicts[0].what and verdicts[0].fix


def test_harmless_environment_settings_pass() -> None:
    (verdict,) = machine.settings({"NPROC": "32", "HTTPS_PROXY": "proxy"}, is_group=False)
    assert verdict.state == "ok" and verdict.what == "NPROC=32"
    assert machine.settings({}, is_group=True)[0].what == "nothing is set"


# ---- folders


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk(small: Path) -> None:
    for name, (_, fix) in machine.FOLDERS.items():
        verdict = machine.disk(name, small / "runs" / "a")
        assert verdict.state == "problem" and "No space left on device" in verdict.what and fix in verdict.fix, verdict
    assert not list(small.iterdir()), "something was left behind"


def test_shared_memory_of_a_container(small: Path, tmp_path: Path) -> None:
    verdict = machine.shared_memory(small)
    assert verdict.state == "warning" and verdict.what.startswith("4 MiB are free") and "--shm-size" in verdict.fix
    verdict = machine.shared_memory(tmp_path / "nowhere")
    assert verdict.state == "warning" and "No such file" in verdict.what


def test_a_check_of_the_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for min_free_bytes, state in ((0, "ok"), (1 << 60, "warning")):
        monkeypatch.setitem(machine.FOLDERS, "run folder", (min_free_bytes, "elsewhere"))
        verdict = machine.disk("run folder", tmp_path / "runs" / "a")
        assert (verdict.state, verdict.where) == (state, f"'{tmp_path}'") and "free" in verdict.what
    assert not list(tmp_path.iterdir())


def test_a_disk_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(machine.fcntl, "flock", flock)
    verdict = machine.disk("run folder", tmp_path)
    assert verdict.state == "problem" and "Function not implemented" in verdict.what
