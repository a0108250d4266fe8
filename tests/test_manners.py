"""The command line's manners: help, completion, colours, Ctrl-C, a quick start."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from sampling import sampled
from spanax import cli
from spanax.commands.launch import LAUNCHERS
from spanax.usage import EXAMPLES
from written import commands, read

PYTHON = [sys.executable, "-m", "spanax"]
NAMES = ["", *cli.COMMANDS, *(f"launch {place}" for place in LAUNCHERS)]


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inputs = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | environment
    return subprocess.run([*PYTHON, *args], capture_output=True, text=True, timeout=240, env=inputs)


# ---- help


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert not stop.value.code and EXAMPLES[name]
    assert all(" ".join(example.split()) in text for example in EXAMPLES[name])


def test_the_examples_of_help_parse() -> None:
    assert set(EXAMPLES) == set(NAMES)
    for examples in EXAMPLES.values():
        for line in commands("\n".join(examples)):
            read(line)


def test_help_imports_only_what_reads_flags() -> None:
    """JAX, NumPy and Rich would each take longer than all of --help."""
    code = """
import json, sys
before = set(sys.modules)
from spanax.cli import main
try:
    main(["--help"])
except SystemExit:
    print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    imported = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    installed = {name for name in imported & set(packages_distributions()) if name != "spanax"}
    assert installed == {"tyro", "docstring_parser", "typing_extensions"}


# ---- completion


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "spanax.bash"
    path.write_text(run("--print-completion", "bash").stdout)
    return path


@pytest.mark.parametrize(
    "typed, offered",
    [
        ("spanax tr", {"train"}),
        ("spanax ch", {"check", "checkpoint"}),
        ("spanax train --micro", {"--microbatches"}),
        ("spanax plan --solve-for ba", {"batch"}),
        ("spanax launch sl", {"slurm"}),
        ("spanax launch local --dev", {"--devices-per-process"}),
    ],
)
def test_bash_completes(script: Path, typed: str, offered: set[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    # What bash does at the Tab key: the function that `complete` named, with the words so far.
    ask = """
    source "$1"; COMP_WORDS=($2); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE="$2"; COMP_POINT=${#2}
    "$(complete -p spanax | sed -E 's/.* -F ([^ ]+).*/\\1/')" spanax "${COMP_WORDS[COMP_CWORD]}"
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(["bash", "--norc", "-c", ask, "-", str(script), typed], capture_output=True, text=True)
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_a_script_is_printed_for_each_shell(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--print-completion", shell])
    output = capsys.readouterr().out
    assert not stop.value.code and "microbatches" in output
    if shutil.which(shell):
        (tmp_path / "script").write_text(output)
        subprocess.run([shell, "-n", "script"], cwd=tmp_path, check=True)  # reads it, and runs nothing


# ---- colours


def on_a_terminal(args: Sequence[str], **environment: str) -> str:
    inputs = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"}
    ours, theirs = pty.openpty()
    with subprocess.Popen([*PYTHON, *args], stdin=theirs, stdout=theirs, stderr=theirs, env=inputs | environment):
        os.close(theirs)
        output = b""
        try:
            while part := os.read(ours, 1 << 16):
                output += part
        except OSError:  # what Linux says when the other side has closed
            pass
    os.close(ours)
    return output.decode()


COLOURS = "\x1b["


def test_colours_are_for_terminals_and_not_where_they_are_unwanted() -> None:
    assert COLOURS in on_a_terminal(["--help"])
    assert COLOURS not in on_a_terminal(["--help"], NO_COLOR="1")
    assert COLOURS not in on_a_terminal(["trian"], NO_COLOR="1")
    assert COLOURS not in run("--help", TERM="xterm-256color").stdout
    assert COLOURS not in run("trian", TERM="xterm-256color").stderr


def test_tables_are_plain_text_everywhere() -> None:
    assert COLOURS not in on_a_terminal(["axes", "gpt-nano"])
    assert COLOURS not in run("axes", "gpt-nano", FORCE_COLOR="1").stdout


# ---- Ctrl-C

BEGIN = "import gc, os, signal, time\n"
READY = "print('ready', flush=True)\n"
AT_WORK = {
    "at work": f"{BEGIN}def workload():\n    {READY}    time.sleep(600)\n",
    "while importing": f"{BEGIN}{READY}time.sleep(600)\n",
    "in a callback": (
        f"{BEGIN}def workload():\n"
        "    once = [signal.SIGINT]\n"
        "    gc.callbacks.append(lambda *_: once and os.kill(os.getpid(), once.pop()))\n"
        f"    {READY}    gc.collect()\n    time.sleep(600)\n"
    ),
}


@pytest.fixture
def in_front() -> Iterator[None]:
    """Commands hear Ctrl-C, also where a shell runs these tests in its background: children ignore what is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", sampled(AT_WORK, ["at work"]))
def test_ctrl_c_prints_one_line(when: str, tmp_path: Path, in_front: None) -> None:
    (tmp_path / "mine.py").write_text(AT_WORK[when])
    argv = [*PYTHON, "axes", "mine.py:workload"]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        if when != "in a callback":
            process.send_signal(signal.SIGINT)
        try:
            _, output = process.communicate(timeout=60 if when == "in a callback" else 240)
        except subprocess.TimeoutExpired:
            # Native code may forget one that hits a callback of its own; whoever sees nothing happen presses it again.
            assert when == "in a callback"
            process.send_signal(signal.SIGINT)
            _, output = process.communicate(timeout=240)
    assert (process.returncode, output) == (130, "spanax: interrupted\n")


AT_ITS_END = {
    "waiting for a thread": (
        "import threading\n"
        "again = lambda: (time.sleep(1), os.kill(os.getpid(), signal.SIGINT), time.sleep(600))\n"
        "threading.Thread(target=again).start()\n"
    ),
    "in a function that is called at exit": "import atexit\natexit.register(os.kill, os.getpid(), signal.SIGINT)\n",
    "when modules are cleared": (
        "class Last:\n    def __del__(self, kill=os.kill):\n        kill(os.getpid(), signal.SIGINT)\nlast = Last()\n"
    ),
}


@pytest.mark.parametrize("when", sampled(AT_ITS_END, ["waiting for a thread"]))
def test_ctrl_c_again_changes_no_exit_code(when: str, tmp_path: Path, in_front: None) -> None:
    first = "def workload():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(600)\n"
    (tmp_path / "mine.py").write_text(f"{BEGIN}{AT_ITS_END[when]}{first}")
    argv = [*PYTHON, "axes", "mine.py:workload"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (130, "spanax: interrupted\n")


def test_an_ignored_sigint_remains_ignored(tmp_path: Path) -> None:
    """As a shell asks of what runs in its background."""
    (tmp_path / "mine.py").write_text(f"{BEGIN}os.kill(os.getpid(), signal.SIGINT)\n{READY}raise SystemExit(3)\n")
    argv = ["bash", "-c", f"trap '' INT; exec {' '.join(PYTHON)} axes mine.py:workload"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout == "ready\n"
