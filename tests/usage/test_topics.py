"""`--help`: every flag in one topic, and one screen a topic."""

import pytest

from requested import flag_names
from spanax import cli
from spanax.commands.launch import LAUNCHERS
from spanax.errors import SpanaxError
from spanax.usage.examples import EXAMPLES
from spanax.usage.topics import MIN_FLAGS, TOPICS, by_topic, help_text

COMMANDS = {name: verb.flags for name, verb in cli.COMMANDS.items() if name != "launch"}
COMMANDS |= {f"launch {place}": flags for place, (flags, _) in LAUNCHERS.items()}
SCREEN_LINES = 40


def test_a_field_has_one_topic() -> None:
    names = [name for group in TOPICS.values() for name in group]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_described(name: str) -> None:
    topics = by_topic(COMMANDS[name])
    flags = [flag for group in topics.values() for flag in group]
    assert {flag.field for flag in flags} == flag_names(COMMANDS[name])
    assert all(flag.summary for flag in flags), [flag.field for flag in flags if not flag.summary]
    if len(flags) >= MIN_FLAGS:  # an overview lists topics: none is left to flags without one
        assert "command" not in topics


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name: str) -> None:
    for topic in ("", *by_topic(COMMANDS[name])):
        lines = help_text(name, COMMANDS[name], topic, width=80).splitlines()
        assert len(lines) <= SCREEN_LINES, (topic, len(lines))
        assert max(len(line) for line in lines if not line.startswith("  spanax ")) <= 88  # commands are not wrapped


def test_help_names_real_flags_values_and_defaults() -> None:
    text = help_text("train", COMMANDS["train"], "all", width=100)
    for part in ("[WORKLOAD]", "--global-batch-size N", "--lr X", "--keep-last N", "(default: 3)", "--resume\n"):
        assert part in text
    assert "--no-cache" in help_text("check", COMMANDS["check"], "compiler")
    assert "--solve-for batch|seq|layers|embed|devices" in help_text("plan", COMMANDS["plan"], "questions")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_examples_of_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--help"])
    text = capsys.readouterr().out
    assert not stop.value.code and EXAMPLES[name] and all(example in text for example in EXAMPLES[name])
    assert f"usage: spanax {name}" in text


def test_help_names_required_flags() -> None:
    assert "--image TEXT" in (text := help_text("launch kubernetes", COMMANDS["launch kubernetes"], "all"))
    assert "(required)" in text and "(default: required)" not in text


def test_an_unknown_topic_names_the_nearest() -> None:
    with pytest.raises(SpanaxError, match="did you mean 'layout'"):
        help_text("train", COMMANDS["train"], "layouts")


def test_help_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help", "faults"])
    assert not stop.value.code
    assert "--max-bad-steps" in capsys.readouterr().out
