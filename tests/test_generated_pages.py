"""The pages that are generated from parsers, schemas and docstrings are current, and complete."""

import dataclasses
import os
import re
from pathlib import Path

import pytest

import spanax
from generated_pages import API, COMMANDS, PAGES, flags_of
from requested import flag_names, groups
from spanax import cli, sealed
from spanax.check import report
from spanax.check.lint.lint import PROFILE_RULES, RULES
from spanax.commands.launch import LAUNCHERS
from spanax.errors import error_types
from spanax.hardware.chips import CHIP_KEYS, DTYPE_KEYS, LINK_KEYS, LINKS
from spanax.plan import plan
from spanax.train.config import TrainConfig
from spanax.train.flags import MIN
from spanax.train.record.events import KINDS
from spanax.train.store import manifest
from spanax.usage import EXAMPLES, OTHER_FLAGS, SAME_FLAGS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    text, page = PAGES[name](), DOCS / name
    if os.environ.get("SPANAX_GOLDEN") == "update":
        page.write_text(text)
    assert page.read_text() == text, f"docs/{name} is out of date: `make golden`, then read the diff"


def test_every_command_is_described_with_an_example() -> None:
    places = {f"launch {place}" for place in LAUNCHERS}
    assert COMMANDS.keys() == (cli.COMMANDS.keys() - {"launch"}) | places
    assert all(EXAMPLES.get(name) for name in (*cli.COMMANDS, *COMMANDS))


def section(title: str) -> str:
    """A section of the page of commands."""
    page = (DOCS / "commands.md").read_text()
    return re.split(r"^## ", page.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_listed(name: str) -> None:
    """In the table of its command, or in that of shared flags and by name."""
    flags = list(flags_of(COMMANDS[name]))
    assert {flag.field for flag in flags} == flag_names(COMMANDS[name]) and all(flag.summary for flag in flags)
    own, shared = section(f"spanax {name}"), section("Shared flags")
    for flag in flags:
        row = f"| `{flag.text}`".replace("|", "\\|")[1:]
        assert row in own or (row in shared and f"`{flag.text.split()[0]}`" in own), flag.text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_is_on_is_described_by_what_turning_it_off_does(name: str) -> None:
    """Help lists it as `--no-...`, and so does the page of commands."""
    kind = COMMANDS[name]
    fields = [field for each in (kind, *map(type, groups(kind).values())) for field in dataclasses.fields(each)]
    on = {field.name for field in fields if field.default is True}
    negated = {
        flag.field for flag in flags_of(kind) if flag.summary.startswith(f"--no-{flag.field.replace('_', '-')} ")
    }
    assert negated == on


def test_every_setting_with_a_range_is_listed() -> None:
    settings = {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(re.findall(r"^\| `(\w+)`", section("Settings"), re.MULTILINE)) == settings & MIN.keys()


def test_every_flag_of_another_tool_is_listed() -> None:
    page = (DOCS / "commands.md").read_text().partition("\n## Flags of other tools\n")[2]
    assert set(re.findall(r"`--([a-z0-9-]+)`[,| ]", page)) >= {*SAME_FLAGS, *OTHER_FLAGS}


def test_every_public_name_has_a_task() -> None:
    names = [name for group in API.values() for name in group]
    assert sorted(names) == spanax.__all__


def test_every_key_of_a_cluster_file_is_described() -> None:
    page = (DOCS / "hardware.md").read_text().partition("## A cluster file")[2].partition("\n## ")[0]
    keys = {*CHIP_KEYS, *DTYPE_KEYS, *LINKS, *(f".{key}" for key in LINK_KEYS)}
    assert not {key for key in keys if f"`{key}`" not in page}


def test_every_kind_of_event_is_described() -> None:
    page = (DOCS / "monitoring.md").read_text().partition("## events.jsonl")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)))) == KINDS.keys()


def test_every_code_of_an_error_has_an_entry() -> None:
    page = (DOCS / "errors.md").read_text()
    codes = [kind.code for kind in error_types()]
    assert re.findall(r"^## (SPX\d+): ", page, re.MULTILINE) == codes == sorted(set(codes))
    entries = re.split(r"^## (SPX\d+): ", page, flags=re.MULTILINE)[1:]
    for code, text in zip(entries[::2], entries[1::2], strict=True):
        assert len(re.findall(r"^\*\*(?:Cause|Fix)\.\*\* \S.{20}", text, re.MULTILINE)) == 2, code


def test_codes_of_errors_and_of_lint_rules_differ() -> None:
    assert not {kind.code for kind in error_types()} & {rule.code for rule in (*RULES, *PROFILE_RULES)}


def test_the_versions_of_formats_are_stated() -> None:
    rows = re.findall(
        r"^\| (?:\S+ )*?\(`(\S+).*?`\) \| `\w+` \| (\d+) \|", (DOCS / "stability.md").read_text(), re.MULTILINE
    )
    assert {name: int(version) for name, version in rows} == {
        "plan.json": plan.VERSION,
        "checkpoints/<step>/manifest.json": manifest._FORMAT,
        "spanax": report.VERSION,
        "config.toml": sealed.FORMAT,
    }
