"""Simulated devices: two threads for each, unless a number is set."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from sampling import sampled
from spanax.errors import SpanaxError
from spanax.processes import devices as given
from spanax.processes.devices import simulate
from spanax.processes.gpu_memory import VARIABLE, missing_setting

LOOP = """
import os, sys
import jax, numpy as np
from spanax.processes.devices import simulate
count = int(sys.argv[1])
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
devices = simulate(count)
mesh = jax.sharding.Mesh(np.array(devices), ("data",))
row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

def step(x):
    for _ in range(4):
        x = jax.lax.with_sharding_constraint(x - 0.1 * x.mean(0), row) + 1e-3 * x.sum(1, keepdims=True)
    return x

step = jax.jit(step, in_shardings=row, out_shardings=row)
x = jax.device_put(np.ones((count * 8, 64), np.float32), row)
for _ in range(300):  # dispatched without waiting for any
    x = step(x)
x.block_until_ready()
print(len(devices), os.environ.get("NPROC", "none"))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux lends a process a part of its cores")
@pytest.mark.parametrize(("count", "threads"), sampled([(1, "2"), (2, "4"), (8, "16")], [(8, "16")]))
def test_two_threads_per_device_do_not_deadlock(count: int, threads: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    environ["XLA_FLAGS"] = "--xla_cpu_collective_call_terminate_timeout_seconds=120"
    command = [sys.executable, "-W", "ignore", "-c", LOOP, str(count)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.split() == [str(count), threads]


def test_an_explicit_number_of_threads_is_not_changed() -> None:
    environ = os.environ | {"NPROC": "5", "XLA_FLAGS": ""}
    code = "import os; from spanax.processes.devices import simulate; simulate(8); print(os.environ['NPROC'])"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["5"], done.stderr[-1000:]


def test_after_jax_has_started_the_environment_is_unchanged() -> None:
    before = dict(os.environ)
    assert "--xla_force_host_platform_device_count" in before["XLA_FLAGS"]
    jax.devices()
    assert len(simulate(2)) == 2 and os.environ == before


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_group_on_cpus_caches_no_programs(num_hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax.config.jax_enable_compilation_cache
    monkeypatch.setattr(jax, "process_count", lambda: num_hosts)
    try:
        simulate(8)
        assert jax.config.jax_enable_compilation_cache == (num_hosts == 1)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_after_jax_has_started_the_error_names_the_call_and_its_place() -> None:
    jax.devices()
    with pytest.raises(SpanaxError, match=r"it has already started with 8 cpu devices") as caught:
        simulate(16)
    assert "spanax.simulate(16)" in str(caught.value) and "--devices" not in str(caught.value)
    assert len(simulate(4)) == 4


def test_after_jax_has_started_on_an_accelerator_nothing_is_simulated() -> None:
    accelerators = [SimpleNamespace(platform="gpu")] * 8
    with mock.patch.object(jax, "devices", lambda: accelerators):
        with pytest.raises(SpanaxError, match="with 8 gpu devices"):
            simulate(8)


@pytest.mark.parametrize(
    ("file", "environ", "is_set"),
    [
        ("dev/nvidiactl", {}, True),
        ("dev/kfd", {"JAX_PLATFORMS": "rocm,cpu"}, True),
        ("dev/nvidiactl", {"JAX_PLATFORMS": "cpu"}, False),
        ("dev/accel0", {}, False),
        ("dev/nvidiactl", {VARIABLE: ".8"}, False),
        ("dev/nvidiactl", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False),
        ("dev/nvidiactl", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False),
    ],
)
def test_jax_gets_most_of_a_gpu_unless_the_user_decides(
    file: str, environ: dict[str, str], is_set: bool, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).touch()
    assert missing_setting(environ, tmp_path) == ({VARIABLE: ".95"} if is_set else {})


@pytest.mark.parametrize(("platform", "count"), [("gpu", 1), ("cpu", 0)])
def test_the_share_of_a_gpu_is_set_before_jax_starts_and_printed_once(
    platform: str, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {"SPANAX_NUM_HOSTS": "1"})
    monkeypatch.setattr(given, "has_backend", lambda: bool(seen))
    monkeypatch.setattr(given, "missing_setting", lambda: {VARIABLE: ".95"})
    seen = list[str]()

    def started(_: int | None) -> list[SimpleNamespace]:
        seen.append(os.environ[VARIABLE])
        return [SimpleNamespace(platform=platform)]

    monkeypatch.setattr(given, "_started", started)
    for _ in range(2):
        given.devices(1)
    assert seen == [".95", ".95"]
    assert capsys.readouterr().err.count("XLA_PYTHON_CLIENT_MEM_FRACTION=.95 is set: by default, JAX") == count
