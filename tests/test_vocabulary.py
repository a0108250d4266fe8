"""notes/vocabulary.md defines each term once; public names consist of its words."""

import dataclasses
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import spanax

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "notes" / "vocabulary.md").read_text()
DEFINITIONS, _, LISTED = PAGE.partition("## Ordinary words")
DEFINITIONS, _, AVOIDED = DEFINITIONS.partition("## Words that are not used")

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
        functions = [inspect.unwrap(value)] if callable(value) else []
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
    assert not used - ordinary, f"define these in notes/vocabulary.md: {sorted(used - ordinary)}"
    assert not ordinary - used, f"these are terms, or in no public name: {sorted(ordinary - used)}"


def test_public_names_have_no_avoided_word() -> None:
    avoided = {word for cell in first_column(AVOIDED) for word in words_of(cell)}
    assert len(avoided) > 10
    assert {name for name in public_names() - JSON_KEYS if avoided & set(words_of(name))} == set()
