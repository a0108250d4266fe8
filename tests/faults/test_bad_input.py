"""Invalid command lines and configurations: the right exit code, the name of the flag, no traceback."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from spanax import cli
from spanax.errors import WriteError
from spanax.processes import processes as hosts

# a command -> the exit code, and what its answer names
BAD: dict[str, tuple[int, str]] = {
    "trian": (2, "train"),
    "train a b": (2, "b"),
    "train --stepz 3": (2, "--steps"),
    "train --steps": (2, "--steps"),
    "train --steps -1": (2, "--steps is -1"),
    "train --steps 1e3": (2, "--steps"),
    "train --steps many": (2, "--steps"),
    "train --steps 99999999999999999999999": (2, "--steps is 99999999999999999999999"),
    "train --global-batch-size 0": (2, "--global-batch-size is 0"),
    "train --seq-len 0": (2, "--seq-len is 0"),
    "train --lr nan": (2, "--learning-rate is nan"),
    "train --lr fast": (2, "--learning-rate"),
    "train --seed -1": (2, "--seed is -1"),
    "train --devices 0": (2, "--devices is 0"),
    "train --keep-last 0": (2, "--keep-last is 0"),
    "train --microbatches 7": (2, "7 microbatches do not divide"),
    "train --pipeline-schedule 1f1b": (2, "--pipeline-schedule 1f1b is for a pipeline"),
    "train --layout pipeline --devices 1 --pipeline-schedule gpipe": (2, "--pipeline-schedule gpipe is for a pipeline"),
    "train --profile 3": (2, "--profile is '3'"),
    "train --profile x:y": (2, "--profile is 'x:y'"),
    "train --mesh": (2, "--mesh"),
    "train --mesh data=8,data=1": (2, "'data' is repeated"),
    "train --mesh data=99999999999": (2, "needs 99999999999 devices"),
    "train --mesh =8": (2, "cannot read '=8'"),
    "train --mesh data=²": (2, "cannot read 'data=²'"),
    "train --profile ²:²": (2, "--profile is '²:²'"),
    "train --mesh data=-8": (2, "'data' has size -8"),
    "train --remat dotz": (2, "did you mean 'dots'"),
    "train --layout fsdp+data": (2, "fsdp+data"),
    "train --dtype int8": (2, "--dtype bfloat16 --quantize int8"),
    "train --tokenizer bpe:3": (2, "bpe:3"),
    "train --tokenizer nowhere.json": (65, "nowhere.json"),
    "train --tokenizer list.json --data text.txt": (65, "list.json"),
    "train --data short.txt": (65, "short.txt"),
    "train --data folder": (65, "'folder' has no text"),
    "train --data odd.bin": (65, "'odd.bin' is truncated"),
    "train --data empty.bin": (65, "'empty.bin' is empty"),
    "train broken.py:x": (3, "ModuleNotFoundError"),
    "train syntax.py:x": (3, "SyntaxError"),
    "train three.py:x": (2, "three.py"),
    "train three.py:y": (2, "'three.py' has no workload 'y'"),
    "train three.py": (2, "unknown workload 'three.py'"),
    "train --config list.toml": (2, "setting 'steps'"),
    "train --config nan.toml": (2, "setting 'learning_rate' is nan; it must be a number"),
    "train --config number.toml": (2, "setting 'json' is 1"),
    "train --config folder": (65, "'folder'"),
    "train --output-dir text.txt/x": (73, "text.txt/x"),
    "train --plan folder": (65, "'folder'"),
    "train --plan list.json": (65, "not a plan file"),
    "plan": (2, "needs a workload"),
    "plan gpt-nano --on cpu": (2, "no valid number of devices"),
    "plan gpt-nano --on cpu:8x": (2, "cpu:8x"),
    "plan gpt-nano --on cpu:99999999999999": (2, "more than 1,048,576 devices"),
    "plan gpt-nano --on cpu:8 --embed -1": (2, "--embed is -1"),
    "plan gpt-nano --on cpu:8 --target-mfu nan": (2, "--target-mfu is nan"),
    "plan --diff list.json": (2, "--diff"),
    "check gpt-nano --on cpu:8 --level 9": (2, "--level"),
    "check gpt-nano --on cpu:8 --fail-on all": (2, "--fail-on"),
    "check gpt-nano --on cpu:8 --plan nowhere.json": (65, "nowhere.json"),
    "axes": (2, "a name, or file.py:name"),
    "axes gpt-nano --seq-len 0": (2, "--seq-len is 0"),
    "checkpoint show": (2, "the folder of checkpoints"),
    "checkpoint forget x": (2, "forget"),
    "checkpoint show text.txt": (65, "text.txt"),
    "checkpoint verify folder": (65, "no checkpoint here"),
    "inspect text.txt": (65, "not a plan file"),
    "inspect folder": (65, "'folder'"),
    "compare gpt-nano --top -1": (2, "--top is -1"),
    "probe --seconds 0": (2, "0.0 seconds"),
    "probe --devices 0": (2, "--devices is 0"),
    "probe --out nowhere/x.toml": (73, "nowhere/x.toml"),
}

FILES = {
    "text.txt": "to be or not to be " * 4000,
    "short.txt": "to be",
    "odd.bin": "\1\2\3",
    "empty.bin": "",
    "list.json": "[1]",
    "broken.py": "import nothing_of_that_name\n",
    "syntax.py": "def (:\n",
    "three.py": "x = 3\n",
    "list.toml": "[[steps]]\n",
    "nan.toml": "lr = nan\n",
    "number.toml": "json = 1\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "folder").mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_reported_without_a_traceback(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    code, names = BAD[line]
    before = {path.name for path in place.iterdir()} - {"__pycache__"}
    with pytest.raises(SystemExit) as stop:
        cli.main(line.split())
    text = "".join(capsys.readouterr())
    assert stop.value.code == code and names in text, text
    assert "Traceback" not in text
    if text.startswith("spanax: "):
        assert len(text.strip().splitlines()) <= 4
    left = {path.name for path in place.iterdir()} - {"__pycache__"} - before
    assert not any((place / name).is_dir() and any((place / name).iterdir()) for name in left), left


@pytest.mark.parametrize("path", ["", " ", "a ", " a", "a\n", "a\tb", "a\x1b[31m"])
@pytest.mark.parametrize("before", [["train"], ["launch", "local", "--", "train"]], ids=["train", "launch"])
def test_a_run_folder_name_with_surrounding_whitespace_raises(
    before: list[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main([*before, "--output-dir", path])
    assert stop.value.code == 2 and "begins or ends with whitespace" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [["train"], ["launch", "slurm", "--dry-run", "--", "train"]], ids=" ".join)
def test_a_configuration_records_the_exact_path_of_its_run_folder(
    before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text('output_dir = "a "\n')
    with pytest.raises(SystemExit) as stop:
        cli.main([*before, "--config", "c.toml"])
    assert stop.value.code == 2 and "begins or ends with whitespace" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]


@pytest.mark.parametrize(
    "words", [["report", b"caf\xe9"], ["train", b"--output-dir=caf\xe9"], ["launch", "local", b"\xff"]]
)
def test_a_path_that_is_not_utf_8_is_one_line(words: list[str | bytes], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "spanax", *words], cwd=tmp_path, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("spanax: an argument is not UTF-8: ") and "\\udc" in line
    assert not list(tmp_path.iterdir())


def test_broadcast_text_keeps_its_whitespace(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import multihost_utils

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda letters: letters)
    assert hosts.from_first(lambda: " a é ", WriteError) == " a é "
    with pytest.raises(WriteError, match="4097 characters"):
        hosts.from_first(lambda: "a" * 4097, WriteError)
