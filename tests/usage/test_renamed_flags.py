"""Former names of flags and settings: accepted with a notice, and equal to their new names."""

from pathlib import Path

import pytest

from requested import flag_names
from spanax import cli
from spanax.commands.launch import LAUNCHERS
from spanax.sealed import sealed
from spanax.train.record.folder import read_config, recorded
from spanax.usage.renamed_flags import RENAMED, current_arguments, current_settings

LAUNCH_FLAGS = {f"launch {place}": kind for place, (kind, _) in LAUNCHERS.items()}


@pytest.mark.parametrize("command", RENAMED)
def test_a_former_name_is_free_and_its_new_name_exists(command: str) -> None:
    kind = LAUNCH_FLAGS[command] if command in LAUNCH_FLAGS else cli.COMMANDS[command].flags
    names = flag_names(kind)
    assert set(RENAMED[command].values()) <= names and not set(RENAMED[command]) & names


@pytest.mark.parametrize(
    ("command", "former", "current"),
    [
        ("train", ["--batch", "8", "--seq=16"], ["--global-batch-size", "8", "--seq-len=16"]),
        ("train", ["--out", "runs/a", "--keep", "2"], ["--output-dir", "runs/a", "--keep-last", "2"]),
        ("train", ["--schedule", "1f1b", "--chunks", "2"], ["--pipeline-schedule", "1f1b", "--virtual-stages", "2"]),
        ("train", ["--spike", "5", "--patience", "1"], ["--spike-factor", "5", "--max-bad-steps", "1"]),
        ("plan", ["--max", "batch", "--out", "p.json"], ["--solve-for", "batch", "--out", "p.json"]),
        ("plan", ["--pipeline", "True"], ["--pipeline"]),
        ("plan", ["--pipeline=False"], ["--no-pipeline"]),
    ],
)
def test_former_names_parse_to_the_same_command(
    command: str, former: list[str], current: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.parse(command, former) == cli.parse(command, current)
    notices = capsys.readouterr().err.splitlines()
    unchanged = ("--out",) if command == "plan" else ()
    assert len(notices) == sum(word.startswith("--") and word not in unchanged for word in former)
    assert all("version 0.2 drops the former name" in notice for notice in notices)


def test_a_value_is_not_a_flag() -> None:
    assert current_arguments("train", ["--output-dir", "batch", "--data=--out"]) == [
        "--output-dir", "batch", "--data=--out",
    ]  # fmt: skip


def test_settings_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("batch = 8\nkeep = 2\nsteps = 3\n")
    assert read_config(file) == {"global_batch_size": 8, "keep_last": 2, "steps": 3}
    assert capsys.readouterr().err.count("is now") == 2
    assert current_settings({"batch": 8, "global_batch_size": 16}) == {"batch": 8, "global_batch_size": 16}


def test_the_settings_of_an_earlier_run_need_no_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(sealed("batch = 8\nseq = 16\n"))
    assert recorded(tmp_path) == {"global_batch_size": 8, "seq_len": 16}
    assert not capsys.readouterr().err
