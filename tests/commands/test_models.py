"""`spanax models`."""

import json

import pytest

from spanax import cli
from spanax.commands.models import ModelsCommand, answer
from spanax.errors import SpanaxError


def test_a_row_has_parameters_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["models", "gpt2-xl", "--json"])
    assert json.loads(capsys.readouterr().out)["models"] == [
        {"name": "gpt2-xl", "parameters": 1_557_611_200, "batch": {"inputs": [8, 1024], "targets": [8, 1024]},
            "data": "python"}
    ]  # fmt: skip


def test_rows_are_those_whose_name_contains_the_text() -> None:
    lines = answer(ModelsCommand("vit-")).text.splitlines()
    assert lines[0].split() == ["name", "parameters", "batch", "data"]
    assert {line.split()[0] for line in lines[1:]} == {"vit-nano", "vit-b16", "vit-l16", "vit-h14", "vit-1b"}


def test_an_unknown_name() -> None:
    with pytest.raises(SpanaxError, match="did you mean 'gpt2'"):
        answer(ModelsCommand("gtp2"))
