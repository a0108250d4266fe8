"""`spanax doctor`: all checks, as text and JSON, with an exit code."""

import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spanax import cli
from spanax.commands.machine import DoctorCommand, diagnose, is_well, verdicts_text
from spanax.doctor import jax_probe
from spanax.doctor.machine import Verdict
from spanax.errors import SpanaxError
from spanax.usage import wants_colors

NAMES = {"packages", "plugins", "settings", "devices", "disk", "shared memory", "coordinator"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX starts, without starting it."""
    answer = jax_probe.MARK + json.dumps({"platform": "cpu", "kind": "cpu", "devices": 1})
    monkeypatch.setattr(jax_probe, "output_of", lambda *args: (0, [answer]))


def test_every_check_runs(started: None, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        verdicts = diagnose(DoctorCommand(tmp_path / "runs", f"{address},{address}"), {})
    assert {item.name for item in verdicts} == NAMES | {"hosts"}
    assert [item.what.split(":")[0] for item in verdicts if item.name == "disk"] == [
        "run folder",
        "temporary",
        "compile cache",
    ]
    assert all(item.fix for item in verdicts if item.state != "ok")
    assert not (tmp_path / "runs").exists()


def test_a_cache_in_a_bucket_is_not_inspected(started: None, tmp_path: Path) -> None:
    verdicts = diagnose(DoctorCommand(tmp_path), {"JAX_COMPILATION_CACHE_DIR": "gs" + "://bucket/cache"})
    assert [item.what.split(":")[0] for item in verdicts if item.name == "disk"] == ["run folder", "temporary"]


def test_a_group_of_hosts_is_checked(started: None, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environ = {"SPANAX_COORDINATOR": address, "SPANAX_NUM_HOSTS": "2", "SPANAX_HOST": "0", "http_proxy": "x"}
    result = {verdict.name: verdict for verdict in diagnose(DoctorCommand(tmp_path, timeout=0.2), environ)}
    assert result["group"].state == "problem" and "host 1 did not connect" in result["group"].what
    assert result["settings"].state == "warning"
    with pytest.raises(SpanaxError, match="out of range for 2 hosts"):
        diagnose(DoctorCommand(tmp_path), environ | {"SPANAX_HOST": "2"})


def test_a_problem_is_exit_code_1(tmp_path: Path) -> None:
    """For real, with JAX: the folder cannot be written to."""
    (tmp_path / "file").touch()
    code = "import sys; from spanax.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--output-dir", str(tmp_path / "file" / "runs"), "--json",
            "--timeout", "240"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert done.returncode == 1 and data["is_well"] is False, done.stderr
    states = {finding["name"]: finding["state"] for finding in data["findings"] if finding["name"] != "disk"}
    assert states["devices"] == "ok", data
    (bad,) = (finding for finding in data["findings"] if finding["state"] == "problem")
    assert bad["name"] == "disk" and "Not a directory" in bad["what"] and bad["fix"]


def test_no_problem_is_exit_code_0(started: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--output-dir", str(tmp_path)])
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("0 problems, ") and "\x1b" not in out


VERDICTS = [
    Verdict("python", "ok", "3.11.7", "hidden"),
    Verdict("devices", "problem", "JAX does not start: \x1b[2Jbad.\nworse", "JAX_PLATFORMS=tpu", "JAX_PLATFORMS=cpu"),
    Verdict("settings", "warning", "NPROC=2", "", "unset it"),
]

EXPECTED_TEXT = """\
ok       python         3.11.7
problem  devices        JAX does not start: \\x1b[2Jbad.\\nworse
                        where: JAX_PLATFORMS=tpu
                        fix: JAX_PLATFORMS=cpu
warning  settings       NPROC=2
                        fix: unset it
1 problem, 1 warning in 3 findings"""


def test_the_text_of_a_diagnosis() -> None:
    assert verdicts_text(VERDICTS) == EXPECTED_TEXT
    coloured = verdicts_text(VERDICTS, in_colours=True)
    assert "\x1b[31mproblem\x1b[0m" in coloured and "\x1b[2J" not in coloured
    assert not is_well(VERDICTS) and is_well([VERDICTS[0], VERDICTS[2]])


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_colors(Terminal()) and not wants_colors(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colors(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colors(Terminal())
