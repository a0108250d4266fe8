"""docs/vocabulary.md defines each term once; public names consist of its words, and prose avoids its phrases."""

import ast
import dataclasses
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import spanax

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "vocabulary.md").read_text()
DEFINITIONS, _, LISTED = PAGE.partition("## Ordinary words")
DEFINITIONS, _, AVOIDED = DEFINITIONS.partition("## Words that are not used")
AVOIDED, _, PHRASES = AVOIDED.partition("## Phrases that prose does not use")

JSON_KEYS = {"is_kept", "is_whole"}
"""Fields of `Report` that are keys of its JSON, which do not change."""


def words_of(name: str) -> list[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def terms() -> list[str]:
    return [term.lower() for term in re.findall(r"\*\*([^*]+)\*\*", DEFINITIONS)]


def spellings() -> set[str]:
    """The stems of all terms, and of the names and code that their definitions mention."""
    marked = re.findall(r"\*+([^*]+)\*+|`([^`]+)`", DEFINITIONS)
    return {stem(word) for groups in marked for group in groups for word in words_of(group)}


def stem(word: str) -> str:
    """A word without an English ending, so that `sharded` and `shards` match `shard`."""
    return re.sub(r"(?<=[a-z]{3})(?:ations?|ings?|es|ed|s|e)$", "", word)


def public_names() -> set[str]:
    """Names of the package, and of the methods, fields and parameters of what it exports."""
    names = set(spanax.__all__)
    for name in spanax.__all__:
        value = getattr(spanax, name)
        functions = [value] if inspect.isfunction(value) else []
        if inspect.isclass(value):
            members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
            names |= members.keys() | {field.name for field in fields_of(value)}
            functions = [getattr(member, "__func__", member) for member in (*members.values(), value.__init__)]
        for function in filter(inspect.isfunction, functions):
            names |= inspect.signature(function).parameters.keys()
    return {name for name in names if not name.startswith("_")} - {"self", "cls", "args", "kwargs"}


def first_column(table: str) -> list[str]:
    """The first cell of each row of a table, below its head."""
    return [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("|")][2:]


def fields_of(value: Any) -> tuple[Any, ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def test_every_term_is_defined_once() -> None:
    assert {term: count for term, count in Counter(terms()).items() if count > 1} == {}


def test_public_names_use_the_vocabulary() -> None:
    known = spellings()
    ordinary = set(words_of(LISTED.partition(":\n")[2]))
    used = {word for name in public_names() for word in words_of(name) if stem(word) not in known}
    assert not used - ordinary, f"define these in docs/vocabulary.md: {sorted(used - ordinary)}"
    assert not ordinary - used, f"these are terms, or in no public name: {sorted(ordinary - used)}"


def test_public_names_have_no_avoided_word() -> None:
    avoided = {word for cell in first_column(AVOIDED) for word in words_of(cell)}
    assert len(avoided) > 10
    assert {name for name in public_names() - JSON_KEYS if avoided & set(words_of(name))} == set()


def test_names_of_tests_state_a_behavior() -> None:
    avoided = {word for cell in first_column(AVOIDED) for word in words_of(cell)} - {"one"}
    assert [name for name in names_of_tests(ROOT / "tests") if is_dialect(name, avoided)] == []
    assert is_dialect("test_a_page_is_told_of", avoided) and is_dialect("test_what_is_stored", avoided)
    assert not is_dialect("test_sharded_step_equals_one_device", avoided)


def names_of_tests(root: Path) -> set[str]:
    return {name for path in root.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}


def is_dialect(name: str, avoided: set[str]) -> bool:
    """Whether the name of a test has an avoided word, or is a clause such as `what_is_stored`."""
    _, first, *others = [*name.split("_"), ""]
    return bool(avoided.intersection((first, *others))) or first in ("what", "who", "whose", "so", "of")


# ---- prose


def phrases() -> list[str]:
    return [phrase.strip() for cell in first_column(PHRASES) for phrase in cell.split(",")]


def prose_of_page(text: str) -> str:
    """A page without code, and without the tables of words and phrases."""
    text = re.sub(
        r"^```.*?^```|^ {4}.*?$", "", text.replace(PHRASES, "").replace(AVOIDED, ""), flags=re.MULTILINE | re.DOTALL
    )
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def prose_of_module(text: str) -> str:
    """The docstrings of a module, without code and examples."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return re.sub(r"`[^`]*`|^ *>>>.*$", "", "\n\n".join(texts), flags=re.MULTILINE)


def used_phrases(prose: str) -> list[str]:
    """The phrases that a text uses, in any case and over the end of a line."""
    prose = " ".join(prose.split())
    return [phrase for phrase in phrases() if re.search(rf"\b{phrase}\b", prose, re.IGNORECASE)]


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("[A-Z]*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", dict.fromkeys(PAGES), ids=lambda page: page.name)
def test_a_page_avoids_the_phrases(page: Path) -> None:
    assert used_phrases(prose_of_page(page.read_text())) == []


def test_docstrings_avoid_the_phrases() -> None:
    modules = {path: used_phrases(prose_of_module(path.read_text())) for path in (ROOT / "src").rglob("*.py")}
    assert {path.relative_to(ROOT).as_posix(): used for path, used in modules.items() if used} == {}


def test_a_phrase_is_recognized() -> None:
    assert len(phrases()) > 20
    assert used_phrases(prose_of_page("Somebody\nis held\nagainst `told of` it.\n\n    asked for\n")) == [
        "held against", "somebody",
    ]  # fmt: skip
    assert used_phrases(prose_of_module('def f():\n    """The rest is to be\n    done.\n\n    >>> hence\n    """')) == [
        "is to be"
    ]
