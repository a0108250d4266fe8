"""Without TPUs libtpu is not started, unless the user has chosen so; what may be a TPU is never excluded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spanax.processes import absent_tpu
from spanax.processes.absent_tpu import has_only_cpus

STARTED = """
import jax
from spanax.processes.devices import devices
devices(2)
print(jax.config.jax_platforms)
"""


@pytest.fixture
def libtpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a package named libtpu, and no other plugin of JAX."""
    folder = tmp_path / "packages"
    (folder / "libtpu").mkdir(parents=True)
    (folder / "libtpu" / "__init__.py").write_text("def get_library_path(): return '/no/such/libtpu.so'")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize(
    ("file", "content", "is_expected"),
    [
        (None, "", True),
        ("sys/bus/pci/devices/0/vendor", "0x8086\n", True),
        ("sys/bus/pci/devices/0/vendor", "0x1ae0\n", False),
        ("dev/accel0", "", False),
        ("dev/vfio/0", "", False),
        ("dev/vfio/vfio", "", True),
        ("dev/nvidiactl", "", False),
    ],
)
def test_devices(file: str | None, content: str, is_expected: bool, libtpu: Path, tmp_path: Path) -> None:
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(content)
    assert has_only_cpus(tmp_path, {}) is is_expected


def test_settings_and_other_plugins(libtpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_only_cpus(tmp_path, {"JAX_PLATFORMS": ""})
    for name in absent_tpu.SETTINGS:
        assert not has_only_cpus(tmp_path, {name: "1"})
    for name, is_expected in (("xla_cuda12", True), ("mine", False)):
        (libtpu / "jax_plugins" / name).mkdir(parents=True)
        (libtpu / "jax_plugins" / name / "__init__.py").touch()
        assert has_only_cpus(tmp_path, {}) is is_expected
    monkeypatch.setattr(absent_tpu.importlib.util, "find_spec", lambda name: None)
    assert not has_only_cpus(tmp_path, {})


@pytest.mark.parametrize(("is_only", "environ", "expected"), [(True, {}, "cpu"), (False, {}, "None")])
def test_the_platform_is_chosen_before_jax_starts(
    is_only: bool, environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    code = f"from spanax.processes import processes; processes.has_only_cpus = lambda: {is_only}"
    clean = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code + STARTED], env=clean | environ, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split() == [expected], done.stderr[-1000:]
