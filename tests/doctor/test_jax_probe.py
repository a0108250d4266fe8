"""JAX tried in a process of its own: one that works, and ones that hang, abort, fail or say nothing."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import spanax
from spanax.check.compilers.compile import _run
from spanax.check.compilers.target import target_of
from spanax.doctor.jax_probe import MARK, devices
from spanax.errors import CompilerError
from spanax.hardware.cluster import cluster

HANG_SECONDS = 240
PACKAGE = Path(spanax.__file__).parent
ENVIRON = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def fake(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_jax_starts() -> None:
    verdict = devices(ENVIRON, HANG_SECONDS)
    assert verdict.state == "ok" and verdict.what.startswith("1 x cpu, JAX starts in"), verdict


@pytest.mark.parametrize(
    ("code", "what", "fix"),
    [
        ("import os; os.abort()", "the process died of SIGABRT", "JAX_PLATFORMS=cpu"),
        (
            "import sys; sys.exit('The TPU is already in use by process 7.')",
            "with code 1",
            "end other processes",
        ),
        (f"print('{MARK}{{}}'); raise SystemExit(3)", "ended with code 3", "JAX_PLATFORMS=cpu"),
        ("print('hello')", "no output", "JAX_PLATFORMS=cpu"),
        ("raise SystemExit('Unknown flags in XLA_FLAGS: --xla_no')", "ended with code 1", "remove the flag"),
    ],
)
def test_a_backend_that_does_not_start(code: str, what: str, fix: str) -> None:
    chosen = devices(ENVIRON, HANG_SECONDS, command=fake(code))
    assert chosen.state == "problem" and what in chosen.what and fix in chosen.fix, chosen
    assert "JAX_PLATFORMS=cpu" in chosen.where and ("process 7" not in code or chosen.where.endswith("process 7."))


def test_files_in_the_working_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax.py").write_text("import pathlib; pathlib.Path('executed').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    assert devices(ENVIRON, 120).state == "ok"
    words = ("launch", "local", "--", "train", "no-such-workload", "--output-dir", "run")
    done = subprocess.run([sys.executable, "-P", "-m", "spanax", *words], capture_output=True, text=True, env=ENVIRON)
    assert done.returncode == 2 and "no-such-workload" in done.stderr, done.stderr
    (tmp_path / "job").mkdir()
    with pytest.raises(CompilerError, match="request.json"):  # its child has got so far
        _run(tmp_path / "job", target_of(cluster("h100:8")), 120)
    assert not (tmp_path / "executed").exists()


def test_every_child_python_excludes_its_folder_from_the_path() -> None:
    words = re.compile(r"""(.{6})(["' ]-m["', ]+spanax)""")
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py"]
    starts = [(path.name, *result) for path in files for result in words.findall(path.read_text())]
    assert len(starts) >= 6 and all("-P" in before for _, before, _ in starts), starts


def test_a_hanging_backend_is_stopped_within_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores SIGTERM, and its own child holds its standard output."""
    new, pid = tmp_path / "new", tmp_path / "pid"
    code = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3000)']);"
        f"open({str(new)!r}, 'w').write(str(other.pid)); os.replace({str(new)!r}, {str(pid)!r}); time.sleep(3000)"
    )

    class Started(subprocess.Popen[str]):
        """A process whose timeout begins once it hangs."""

        def wait(self, timeout: float | None = None) -> int:
            while not pid.exists() and self.poll() is None:
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Started)
    chosen = devices({**os.environ, "JAX_PLATFORMS": "tpu"}, 1.0, command=fake(code))
    assert chosen.state == "problem" and "no answer within 1 s" in chosen.what and "JAX_PLATFORMS=tpu" in chosen.where
    stat = Path(f"/proc/{pid.read_text()}/stat")
    deadline = time.monotonic() + HANG_SECONDS
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", "what it started lives on"


def test_output_of_libraries_is_ignored() -> None:
    answer = '{"platform": "gpu", "kind": "H200", "devices": 4}'
    code = f"print('[Gloo] hello'); print({MARK + answer!r}); print('goodbye')"
    chosen = devices({**os.environ, "JAX_PLATFORMS": ""}, HANG_SECONDS, command=fake(code))
    assert chosen.state == "ok" and chosen.what.startswith("4 x H200 (gpu), JAX starts in"), chosen


def test_an_accelerator_that_jax_does_not_use(tmp_path: Path) -> None:
    command = fake(f"""print('{MARK}{{"platform": "cpu", "kind": "cpu", "devices": 1}}')""")
    for name, kind in (("nvidia0", "GPU"), ("accel3", "TPU"), ("kfd", "GPU")):
        dev = tmp_path / name
        dev.mkdir()
        assert devices({}, HANG_SECONDS, command=command, dev=dev).state == "ok"
        (dev / name).touch()
        chosen = devices({}, HANG_SECONDS, command=command, dev=dev)
        assert (
            chosen.state == "warning"
            and f"this machine has a {kind}, but JAX uses the CPU" in chosen.what
            and chosen.fix
        )
        assert devices({"JAX_PLATFORMS": "cpu"}, HANG_SECONDS, command=command, dev=dev).state == "ok"


def test_an_unknown_xla_flag_raises_in_a_child_process() -> None:
    chosen = devices({**ENVIRON, "XLA_FLAGS": "--xla_no_such_flag=1"}, HANG_SECONDS)
    assert chosen.state == "problem" and "remove the flag from XLA_FLAGS" in chosen.fix, chosen
