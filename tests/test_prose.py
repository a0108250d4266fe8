"""The pages are one short book: few words, short sentences, narrow tables, and each figure with its command."""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from written import pages

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [path.relative_to(ROOT).as_posix() for path in pages(ROOT)]
REFERENCE = [
    f"docs/{name}.md" for name in ("api", "commands", "errors", "hardware", "layouts", "losses", "models", "stability")
]
"""Pages to look things up in; most of their text is generated."""

CITING = ["README.md", "docs/evidence.md", "docs/guarantees.md"]
"""Pages that may cite files of the source and tests."""

MAX_PAGES = 32
MAX_WORDS = 40_000
MAX_SENTENCE_WORDS = 25
MAX_COLUMNS = 5

NO_PROSE = re.compile(r"^```.*?^```$|^ {4}[^\n]*$|!\[[^]]*\]", re.MULTILINE | re.DOTALL)
"""Fenced and indented blocks, and descriptions of pictures."""

COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
GENERATED = re.compile(r"<!-- (?:table: \w+|[\w ]+) \(make golden\) -->.*?<!-- end[\w ]* -->", re.DOTALL)
OWNED = re.compile(r"<!-- figures: (?P<owner>[^>]+?), \d{4}-\d\d-\d\d(?:, [0-9a-f]{7,40})? -->\n(?:.+\n)+")
CODE = re.compile(r"`[^`\n]+`")
FIGURE = re.compile(
    r"\d[\d,]*(?:\.\d+)?\s?%"
    r"|\d+\.\d+\s(?:s|ms|µs|seconds|minutes|hours|GiB|MiB|GB/s|TB/s)\b"
    r"|\d[\d,.]*\s?(?:tokens/s|FLOP/s|x\b(?! \d))"
    r"|MFU (?:of )?\d"
    r"|\d[\d,.]*\stimes\s(?:faster|slower|more|less|fewer|longer)"
)
"""What is measured or predicted: shares, times and sizes with decimals, rates, and ratios."""


def prose(text: str) -> str:
    """The text of a page without its blocks of code and its pictures."""
    return NO_PROSE.sub("", text)


def unowned(text: str) -> list[str]:
    """The figures of a page that no command owns: outside of shown output, generated tables and marked paragraphs."""
    rest = CODE.sub("", OWNED.sub("", GENERATED.sub("", prose(text))))
    return [match[0] for match in FIGURE.finditer(rest)]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page: of paragraphs and items of lists, not of tables and headings."""
    lines = (line for line in prose(text).splitlines() if not re.match(r"\s*(\||#|<|!\[|:::|\[\^)", line))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", CODE.sub("code", paragraph))
        yield from (sentence for sentence in re.split(r"(?<=[.!?:;])\s+", plain.strip()) if sentence)


def cited(text: str) -> list[str]:
    """Files of the source and tests, and names of tests, in the text of a page."""
    return re.findall(r"(?:src|tests|benchmarks)/[\w/]+\.py|\btest_\w+", COMMENT.sub("", prose(text)))


def wide_tables(text: str) -> list[str]:
    """The heads of tables of more columns than a narrow page holds."""
    heads = re.findall(r"^(\|.*\|)\n\|[-| :]+\|$", prose(text), re.MULTILINE)
    return [head for head in heads if head.replace("\\|", "").count("|") - 1 > MAX_COLUMNS]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in REFERENCE])
def test_every_figure_has_a_command_that_prints_it(page: str) -> None:
    assert not unowned((ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_the_owner_of_a_figure_exists(page: str) -> None:
    owners = [match["owner"] for match in OWNED.finditer((ROOT / page).read_text())]
    files = [file for owner in owners for file in re.findall(r"(?:benchmarks|tests|examples)/[\w/.]+", owner)]
    assert not [file for file in files if not (ROOT / file).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in (*CITING, *REFERENCE)])
def test_a_page_for_users_cites_no_files_of_the_source(page: str) -> None:
    assert not cited((ROOT / page).read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if page not in REFERENCE])
def test_tables_are_narrow(page: str) -> None:
    assert not wide_tables((ROOT / page).read_text())


def test_the_book_is_short() -> None:
    texts = [(ROOT / page).read_text() for page in PAGES if page not in REFERENCE]
    assert len(texts) <= MAX_PAGES
    assert sum(len(text.split()) for text in texts) <= MAX_WORDS
    longest = [statistics.quantiles([len(item.split()) for item in sentences(text)], n=20)[-1] for text in texts]
    assert statistics.median(longest) <= MAX_SENTENCE_WORDS


def test_what_a_page_must_not_have_is_detected() -> None:
    paragraph = "It takes 12 % less, 3.5 s a step and is 3 times faster; 8 devices and `90 %` are no measurements.\n"
    assert unowned(paragraph) == ["12 %", "3.5 s", "3 times faster"]
    assert not unowned(f"<!-- figures: python benchmarks/scale.py, 2026-11-26, 43fc42a -->\n{paragraph}")
    assert unowned(f"<!-- figures: python benchmarks/scale.py -->\n{paragraph}")
    assert not unowned(f"<!-- table: rows (make golden) -->\n{paragraph}<!-- end -->")
    assert not unowned(f"```text\n{paragraph}```\n")
    assert cited("See `tests/test_a.py` and test_of_it.") == ["tests/test_a.py", "test_of_it"]
    assert wide_tables("| a | b | c | d | e | f |\n|---|---|---|---|---|---|\n") == ["| a | b | c | d | e | f |"]
    assert list(sentences("# Title\n\nOne. Two [three](x.md):\n- `a b c` four\n")) == [
        "One.",
        "Two three:",
        "- code four",
    ]
