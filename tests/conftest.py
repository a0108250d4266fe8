"""The machine the tests run on: 8 simulated CPU devices, set up before JAX is imported."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import jax

if "jax" in sys.modules:
    raise RuntimeError("JAX was imported before tests/conftest.py could set its devices up")

ROOT = Path(__file__).resolve().parent.parent

# `none_such` is preserved: the tests of trace, hardware and plan also pass without a JAX backend.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's CPU collectives starve, and abort after 40 s, with fewer threads than waiting devices; NPROC sizes their pool.
os.environ.setdefault("NPROC", "16")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8")
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # Most of the time goes into compiling tiny programs: without LLVM's optimizations a third less of it.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
if "xla_cpu_parallel_codegen_split_count" not in os.environ["XLA_FLAGS"]:
    # One LLVM module per program instead of up to 32, which would not be faster on two cores.
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10.") and "xla_cpu_use_fusion_emitters" not in os.environ["XLA_FLAGS"]:
    # The older of its two code generators takes half the time; jaxlib 0.12 has it no more, and aborts at the flag.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
if "xla_cpu_collective_call_terminate_timeout_seconds" not in os.environ["XLA_FLAGS"]:
    # XLA aborts when a device comes 40 s late to a collective, which on a busy machine is no deadlock.
    os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
# Most test time is compile time. Sizes and costs of a cached program equal the compiled one's; only the source
# lines in its HLO metadata may be another caller's.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(ROOT / ".cache" / "hypothesis"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
# Traced programs are cached for the session: by default, collecting cycles among them takes a twentieth of the time.
gc.set_threshold(50_000, 10, 10)
# Subprocesses the tests start see the same source, installed or not.
paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
ENVIRON = dict(os.environ)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--checked", default="", help="paths that `make check` ran: of them, only what needs devices runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests that `make check` ran before, in the same call of make."""
    checked = tuple(config.getoption("checked").split())
    done = [item for item in items if item.nodeid.startswith(checked) and "devices" not in item.fixturenames]
    if done:
        config.hook.pytest_deselected(items=done)
        left_out = set(done)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def backend() -> None:
    """Starts JAX, where a backend can start: else the first test that calls `spanax train` chooses the devices."""
    import jax

    with suppress(RuntimeError):
        jax.devices()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restores the environment, which later tests' processes inherit, and fails the test that changed it."""
    yield
    changed = {name for name, value in ENVIRON.items() if os.environ.get(name) != value}
    changed |= {name for name in os.environ.keys() - ENVIRON.keys() if name.startswith(("JAX_", "XLA_", "SPANAX_"))}
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: ENVIRON[name] for name in changed & ENVIRON.keys()})
    assert not changed, f"left behind in os.environ: {', '.join(sorted(changed))}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def devices() -> "list[jax.Device]":
    """The devices here; what needs them is left out where JAX can start no backend (`make check`)."""
    import jax

    try:
        return jax.devices()
    except RuntimeError:
        pytest.skip("JAX can start no backend here")


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """A list with an item for each program that XLA has compiled since the test began."""
    import jax

    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
