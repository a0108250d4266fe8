"""`spanax generate`: text in a terminal, JSON lines in a pipe, chat templates, and what is refused."""

import io
import json
import shutil
import sys
from pathlib import Path

import jax
import pytest
from flax import nnx

import spanax
from spanax import cli
from spanax.commands.generate import GenerateCommand, _options, _pieces
from spanax.interop.loaded_model import LoadedModel, load_model

WEIGHTS = Path(__file__).parent.parent / "interop" / "weights"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "run"
    cli.main(["train", "gpt-nano", "--steps", "1", "--output-dir", str(folder), "--eval-batches", "1"])
    return folder


@pytest.fixture(scope="module")
def imported(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    cli.main(["export", str(run_folder), "--as", "gpt2", "--output-dir", str(folder / "out")])
    cli.main(["import", str(folder / "out"), "--as", "gpt2", "--output-dir", str(folder / "weights")])
    return folder / "weights"


def outputs(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict]:
    capsys.readouterr()
    cli.main(["generate", *args])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_pipe_gets_one_object_per_generation(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--prompt", "import ", "def ", "--max-new-tokens", "6", "--temperature", "0", "--num-samples", "2")
    rows = outputs(capsys, str(run_folder), *args)
    assert [row["prompt"] for row in rows] == ["import ", "import ", "def ", "def "]
    assert all(len(row["tokens"]) == len(row["log_probabilities"]) == 6 for row in rows)
    assert all(row["step"] == 1 and not row["is_stopped"] for row in rows)
    model = load_model(run_folder).model
    (expected,) = spanax.generate(model, [list(b"import ")], 6, temperature=0)
    assert rows[0]["tokens"] == rows[1]["tokens"] == list(expected.tokens)
    assert outputs(capsys, str(run_folder), *args, "--mesh", "fsdp=4,model=2")[2]["tokens"] == rows[2]["tokens"]


def test_prompts_are_lines_of_a_file_or_of_standard_input(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("import os\n\nclass A\n")
    rows = outputs(capsys, str(run_folder), "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "1")
    assert [row["prompt"] for row in rows] == ["import os", "class A"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("x = 1\n"))
    (row,) = outputs(capsys, str(run_folder), "--prompts", "-", "--max-new-tokens", "1")
    assert row["prompt"] == "x = 1"


def test_imported_weights_continue_as_the_run_and_chat_has_a_template(
    run_folder: Path, imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--prompt", "import ", "--max-new-tokens", "6", "--temperature", "0")
    (of_run,) = outputs(capsys, str(run_folder), *args)
    (of_weights,) = outputs(capsys, str(imported), *args)
    assert of_run["tokens"] == of_weights["tokens"]
    saved = load_model(imported, dtype="bfloat16")
    assert {str(value.dtype) for value in jax.tree.leaves(nnx.state(saved.model))} == {"bfloat16"}
    assert _options(GenerateCommand(imported), saved, 7)["max_new_tokens"] == 64 - 7  # as many as it has positions
    chat = tmp_path / "chat"
    shutil.copytree(imported, chat)
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ bos_token }}"
    (chat / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": {"content": "!"}}))
    (asked,) = outputs(capsys, str(chat), "--chat", *args)
    (plain,) = outputs(capsys, str(imported), "--prompt", "<user>import !", *args[2:])
    assert asked["prompt"] == "import " and asked["tokens"] == plain["tokens"]


def test_a_terminal_gets_the_text(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["generate", str(run_folder), "--prompt", "import ", "--max-new-tokens", "5", "--temperature", "0"]
    (row,) = outputs(capsys, *args[1:])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cli.main(args)
    streamed = capsys.readouterr().out
    assert streamed.startswith("import ") and streamed.endswith("\n") and len(streamed) > len("import \n")
    cli.main([*args, "--num-samples", "2"])
    assert capsys.readouterr().out.count(streamed.strip("\n")) == 2
    assert row["text"].isprintable() is False or streamed == f"import {row['text']}\n"


class Characters:
    """Bytes of UTF-8 as tokens."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "stops", "pieces"),
    [
        ("añb", [], ["a", "ñ", "b", ""]),
        ("abENDc", ["END"], ["a", "b"]),
        ("abEN", ["END"], ["a", "bEN"]),
        ("ab", [ord("b")], ["a", ""]),
    ],
)
def test_text_is_printed_once_it_is_certain(text: str, stops: list, pieces: list[str]) -> None:
    saved = LoadedModel(None, None, 0, Characters(), None, None, None)
    found = list(_pieces(saved, stops, iter(text.encode())))
    assert "".join(found) == "".join(pieces) and "\ufffd" not in "".join(found)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "there is no prompt"),
        (("--prompts", "no/such/file"), "cannot read the prompts"),
        (("--prompt", ""), "prompt 0 is empty"),
        (("--prompt", "a", "--temperature", "-1"), "`temperature` is -1"),
        (("--prompt", "a", "--max-new-tokens", "0"), "`max_new_tokens` is 0"),
        (("--prompt", "a" * 80), "a prompt has 80 tokens, and the model has 64 positions"),
        (("--prompt", "a", "--max-new-tokens", "1000"), "the model has 64 positions"),
        (("--prompt", "a", "--chat"), "no chat template"),
    ],
)
def test_bad_input(run_folder: Path, args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", str(run_folder), *args])
    assert stop.value.code and words in capsys.readouterr().err


def test_a_model_without_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", str(tmp_path), "--workload", "vit-nano", "--prompt", "a"])
    assert "does not read tokens" in capsys.readouterr().err
