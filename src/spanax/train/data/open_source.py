"""Opens the sources that a path, a pattern, a dataset or a mixture of them names."""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spanax.entries.local_path import local_path
from spanax.errors import DataError, UnknownNameError, nearest
from spanax.train.data.elements import BatchLeaf, Leaves
from spanax.train.data.examples import Examples, check_enough
from spanax.train.data.formats.column import Column, default_field
from spanax.train.data.formats.table import Table, is_table, open_table
from spanax.train.data.mixture import Mixture, named
from spanax.train.data.source import batch_size, check_examples, conformed, sequence_examples
from spanax.train.data.text.corpus import Corpus, check_split, load_corpus
from spanax.train.data.text.token_windows import bin_tokens, corpus_tokens, windows
from spanax.train.data.text.tokenizer import Tokenizer, TrainedTokenizer, load_tokenizer
from spanax.train.data.text.tokens import Tokens

WINDOWS = {"inputs", "targets"}
"""The leaves of batches of text or tokens."""


@dataclass(frozen=True)
class Reading:
    """Options for reading named data.

    Attributes:
      tokenizer: the tokenizer for text.
      split: `"train"` or `"validation"`.
      field: the field of a table with the text or the tokens, or several, of which the first that a table has is read;
        or `leaf=field,leaf=field`, or such a mapping.
      cache_dir: the directory of the cache.
    """

    tokenizer: str | TrainedTokenizer = "bytes"
    split: str = "train"
    field: str | Mapping[str, str] | None = None
    cache_dir: str | os.PathLike[str] | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of a table whose fields are the leaves of a batch.

    Attributes:
      table: the table.
      fields: the field of each leaf.
    """

    table: Table
    fields: Mapping[str, str]


def is_named(source: Any) -> bool:
    """Returns whether a source is a path, `python`, or a mixture of these; such sources have a validation split."""
    source = named(source)
    return isinstance(source, str | Path) or (
        isinstance(source, Mixture) and all(is_named(part) for part, _ in source.parts)
    )


def opened(source: Any, leaves: Collection[str], reading: Reading) -> list[tuple[Any, int]]:
    """Returns the parts of a source with their weights: Tokens, Rows, or a sequence unchanged.

    Args:
      source: a path, a pattern, `"python"`, a Hugging Face dataset, a sequence, or a mixture of them.
      leaves: the paths of the leaves of a batch.
      reading: the options for named data.
    """
    source = named(source)
    check_split(reading.split)
    pairs = source.parts if isinstance(source, Mixture) else ((source, 1),)
    data = [_loaded(part, leaves, reading) for part, _ in pairs]
    texts = [part for part in data if isinstance(part, Corpus) or (isinstance(part, Column) and part.holds_text)]
    tokenizer = load_tokenizer(reading.tokenizer, texts, reading.cache_dir) if texts else None
    return [(_tokens(part, tokenizer, reading), weight) for part, (_, weight) in zip(data, pairs, strict=True)]


def vocab_size(source: Any, leaves: Collection[str], reading: Reading) -> int | None:
    """Returns the size of the smallest vocabulary with every token of a source, or None without tokens.

    Example:
      >>> vocab_size("python", WINDOWS, Reading())
      256
    """
    parts = [part for part, _ in opened(source, leaves, reading)]
    return max((part.vocab_size for part in parts if isinstance(part, Tokens)), default=None)


def examples(part: Any, placements: Sequence[BatchLeaf], rows_R: np.ndarray, least: int) -> Examples:
    """Returns the examples of a part from `opened`; raises TooFewExamplesError if there are fewer than `least`."""
    if isinstance(part, Tokens):
        return windows(part, placements, least)
    if isinstance(part, Rows):
        return _row_examples(part, placements, least)
    return sequence_examples(part, placements, rows_R, least)


def _loaded(source: Any, leaves: Collection[str], reading: Reading) -> Any:
    """Returns a source as a Corpus, a Column, Rows, Tokens, or an unchanged sequence."""
    if source == "python":
        return load_corpus(source)
    if isinstance(source, str | os.PathLike):
        if local_path(source).suffix == ".bin":
            return bin_tokens(Path(source), reading.split)
        if not is_table(source):
            return load_corpus(source)
        return _of_table(open_table(source, split=reading.split, cache_dir=reading.cache_dir), leaves, reading.field)
    if (table := _hub_table(source, reading.split)) is not None:
        return _of_table(table, leaves, reading.field)
    if reading.split != "train":
        raise UnknownNameError(
            f"a {type(source).__name__} has no split '{reading.split}'.", fix="another source for it"
        )
    return source


def _hub_table(source: Any, split: str) -> Table | None:
    """Returns the rows of a Hugging Face Dataset or of one split of a DatasetDict; None for other sources."""
    datasets = sys.modules.get("datasets")  # without an import, the source is not one of its datasets
    if not datasets or not isinstance(source, datasets.Dataset | datasets.DatasetDict):
        return None
    from spanax.train.data.formats.hub import dataset_table

    if isinstance(source, datasets.DatasetDict):
        if split not in source:
            raise UnknownNameError(f"the DatasetDict has no split '{split}'.", fix=nearest(split, source))
        source = source[split]
    elif split != "train":
        raise UnknownNameError(f"a Dataset has no split '{split}'.", fix="a DatasetDict, or another source for it")
    return dataset_table(source, split)


def _of_table(table: Table, leaves: Collection[str], field: str | Mapping[str, str] | None) -> Column | Rows:
    """Returns Rows if the table has the leaves of a batch, else the Column with text or tokens."""
    if isinstance(field, str) and "=" in field:
        pairs = [pair.partition("=") for pair in field.split(",")]
        field = {leaf.strip(): name.strip() for leaf, _, name in pairs}
    if isinstance(field, str):
        names = [name.strip() for name in field.split(",")]
        return Column(table, next((name for name in names if name in table.fields), "") or _known(table, names[0]))
    fields = {leaf: leaf for leaf in leaves} | dict(field or {})
    for leaf in field or {}:
        if leaf not in leaves:
            raise UnknownNameError(
                f"the plan has no leaf '{leaf}'.", where=f"--field {leaf}=...", fix=nearest(leaf, leaves)
            )
    if field or all(leaf in table.fields for leaf in leaves):
        return Rows(table, {leaf: _known(table, name) for leaf, name in fields.items()})
    listed = ", ".join(leaves)
    if set(leaves) != WINDOWS:
        missing = next(leaf for leaf in leaves if leaf not in table.fields)
        raise DataError(
            f"'{table.name}' has no field '{missing}'.",
            where=f"it has {', '.join(table.fields)[:150]}; the plan expects {listed[:150]}",
            fix=f"--field {missing}=NAME",
        )
    return Column(table, default_field(table, leaves=listed))


def _known(table: Table, field: str) -> str:
    if field not in table.fields:
        raise DataError(f"'{table.name}' has no field '{field}'.", fix=nearest(field, table.fields))
    return field


def _tokens(part: Any, tokenizer: Tokenizer | None, reading: Reading) -> Any:
    if isinstance(part, Corpus) and tokenizer is not None:
        return corpus_tokens(part, tokenizer, reading.split, reading.cache_dir)
    if isinstance(part, Column):
        return part.tokens(tokenizer if part.holds_text else None, cache_dir=reading.cache_dir)
    return part


def _row_examples(rows: Rows, placements: Sequence[BatchLeaf], least: int) -> Examples:
    table, fields = rows.table, rows.fields
    name = f"{table.name} {table.split} {table.digest}"
    check_enough(name, table.num_rows, least, batch_size(placements))
    check_examples(name, placements)

    def read(indices_R: np.ndarray) -> Leaves:
        table_rows = table.rows(indices_R.tolist(), sorted(set(fields.values())))
        items = [{leaf: row[field] for leaf, field in fields.items()} for row in table_rows]
        return conformed(items, placements, name)

    like = _nested_like([leaf.path for leaf in placements])
    read(np.zeros(1, np.int64))  # raises before the first step if an example does not match
    return Examples(name, like, table.num_rows, read)


def _nested_like(paths: Sequence[str]) -> Any:
    """Returns the pytree of leaf paths: dicts, tuples if the keys are 0, 1, ..., or a single leaf."""
    if list(paths) in (["batch"], [""]):
        return None
    keys = dict.fromkeys(path.partition(".")[0] for path in paths)
    inner = {key: [path.partition(".")[2] for path in paths if path.partition(".")[0] == key] for key in keys}
    children = {key: _nested_like(inner_paths) for key, inner_paths in inner.items()}
    return tuple(children.values()) if list(children) == [str(i) for i in range(len(children))] else children
