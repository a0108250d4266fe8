"""Opens the sources that a path, a pattern, a dataset or a mixture of them names."""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spanax.entries.local_path import local_path
from spanax.errors import BatchError, DataError, TooFewExamplesError, UnknownNameError, nearest
from spanax.sealed import digest
from spanax.train.data.destination import Destination, Leaves, conform_array, example_shape
from spanax.train.data.formats.table import Table, is_table, open_table
from spanax.train.data.mixture import Mixture, named
from spanax.train.data.order import SPLITS
from spanax.train.data.packing import PACKED, SEGMENTS, WEIGHTED, conversation_rows
from spanax.train.data.source import (
    Examples,
    Options,
    Source,
    check_enough,
    check_mixable,
    element_source,
    in_order,
    sequence_examples,
)
from spanax.train.data.text.chat_template import load_template
from spanax.train.data.text.conversations import FORMATS, PROMPT, Chat, Conversations, chat_of, documents_of
from spanax.train.data.text.corpus import Corpus, load_corpus
from spanax.train.data.text.tokenizer import Tokenizer, TrainingText, load_tokenizer
from spanax.train.data.text.tokens import Column, Tokens, bin_tokens, corpus_tokens

WINDOWS = {"inputs", "targets"}
"""The leaves of batches of text or tokens."""

TEXTS = ("text", "input_ids")
"""The fields of texts or tokens, of which the first that a table has is read."""

OWN_MODEL = "for a model of the columns see A CSV file, docs/data.md"
"""What to do with a table of other data than the workload's."""

NUM_ROWS_HASHED = 16
DATASET_ROWS_AT_ONCE = 256


class Rows(NamedTuple):
    """The rows of a table whose fields are the leaves of a batch, by leaf; those of a dataset are read from it."""

    table: Table
    fields: Mapping[str, str]
    dataset: Any = None


def is_named(source: Any) -> bool:
    """Returns whether a source is a path, `python`, or a mixture of these; such sources have a validation split."""
    source = named(source)
    return isinstance(source, str | Path) or (
        isinstance(source, Mixture) and all(is_named(part) for part, _ in source.parts)
    )


def open_source(source: Any, destination: Destination, options: Options) -> Source:
    """Returns a source of the rows of each batch that this process reads; see `batches`."""
    paths = [leaf.path for leaf in destination.leaves]
    if options.pack and set(paths) != PACKED:
        raise BatchError(
            f"pack=True needs {', '.join(sorted(PACKED - set(paths)) or sorted(PACKED))} in the batch.",
            where=f"the batch has {destination.planned}",
            fix="inputs, targets, segments and positions, int32, and weights, float32, of one shape [B, T]",
        )
    parts = opened(source, paths, options)
    whole = next((part for part, _ in parts if options.pack and not isinstance(part, Conversations)), None)
    if whole is not None:
        raise DataError(
            "pack=True packs the rows of tables: texts, tokens or conversations. This source has no such rows.",
            where=getattr(whole, "name", type(whole).__name__),
            fix="JSON Lines, Parquet or a Dataset with a document in each row",
        )
    if len(parts) == 1 and parts[0][0] is source:
        return element_source(source, destination, options)
    examples = [(_examples(part, destination, options), weight) for part, weight in parts]
    return in_order(examples, destination, options)


def opened(source: Any, leaves: Collection[str], options: Options) -> list[tuple[Any, int]]:
    """Returns the parts of a source with their weights: Tokens, Conversations, Rows, or a sequence unchanged."""
    source = named(source)
    if options.split not in SPLITS:
        raise UnknownNameError(f"unknown split '{options.split}'.", fix=nearest(options.split, SPLITS))
    pairs = source.parts if isinstance(source, Mixture) else ((source, 1),)
    parts = [_loaded(part, leaves, options) for part, _ in pairs]
    texts = [text for part in parts if (text := _training_text(part)) is not None]
    tokenizer = load_tokenizer(options.tokenizer, texts, options.cache_dir) if texts else None
    for number, part in enumerate(parts):
        if isinstance(part, Corpus) and tokenizer is not None:
            parts[number] = corpus_tokens(part, tokenizer, options.split, options.cache_dir)
        elif isinstance(part, Column):
            encode = documents_of if SEGMENTS in leaves else Column.tokens
            parts[number] = encode(part, tokenizer if part.holds_text else None, options.cache_dir)
        elif isinstance(part, Chat) and tokenizer is not None:
            parts[number] = _conversations(part, tokenizer, options)
    return [(part, weight) for part, (_, weight) in zip(parts, pairs, strict=True)]


def _conversations(chat: Chat, tokenizer: Tokenizer, options: Options) -> Conversations:
    """Returns the conversations of a table; a prompt and its completion have a template only if one is asked for."""
    path = options.tokenizer if isinstance(options.tokenizer, str) else options.tokenizer.name
    is_plain = chat.format == PROMPT and options.chat_template is None
    template = None if is_plain else load_template(options.chat_template, tokenizer, path)
    return chat.tokens(tokenizer, template, options.cache_dir)


def _training_text(part: Any) -> TrainingText | None:
    """Returns the text of a part that a tokenizer is trained on."""
    if isinstance(part, Corpus):
        return TrainingText((part.train,), len(part.train), [part.train])
    return part.training_text if isinstance(part, Chat) or (isinstance(part, Column) and part.holds_text) else None


def vocab_size(parts: Iterable[Any]) -> int | None:
    """Returns the size of the smallest vocabulary with every token of parts from `opened`, or None without tokens."""
    return max((part.vocab_size for part in parts if isinstance(part, Tokens)), default=None)


def _loaded(source: Any, leaves: Collection[str], options: Options) -> Any:
    """Returns a source as a Corpus, a Column, a Chat, Rows, Tokens, or an unchanged sequence."""
    split = options.split
    if isinstance(source, str | os.PathLike):
        if source != "python" and local_path(source).suffix == ".bin":
            return bin_tokens(Path(source), split)
        if source == "python" or not is_table(source):
            return load_corpus(source)
        return _of_table(open_table(source, split=split), leaves, options.field)
    datasets = sys.modules.get("datasets")  # without an import, the source is not one of its datasets
    if datasets and isinstance(source, datasets.DatasetDict):
        if split not in source:
            raise UnknownNameError(f"the DatasetDict has no split '{split}'.", fix=nearest(split, source))
        source = source[split]
    elif split != "train":
        message = f"a {type(source).__name__} has no split '{split}'."
        raise UnknownNameError(message, fix="a DatasetDict, or another source for it")
    if datasets and isinstance(source, datasets.Dataset):
        part = _of_table(_dataset_table(source, split), leaves, options.field)
        return part._replace(dataset=source) if isinstance(part, Rows) else part
    return source


def _dataset_table(dataset: Any, split: str) -> Table:
    """Returns a table of all rows of a dataset."""
    places = np.linspace(0, len(dataset), NUM_ROWS_HASHED, endpoint=False, dtype=np.int64).tolist()
    stored = dataset.with_format("arrow")
    rows = (repr(stored[place].to_pydict()) for place in places if len(dataset))
    key = digest(f"{len(dataset)} {dataset.column_names}", *rows)
    read = partial(_dataset_values, dataset)
    fields = tuple(dataset.column_names)
    objects = partial(_dataset_objects, dataset)
    return Table("Dataset", fields, read, key, key, dataset.data.nbytes, split, False, objects)


def _dataset_objects(dataset: Any, fields: Sequence[str]) -> Iterator[tuple[Callable[[], str], dict[str, Any]]]:
    plain = dataset.select_columns(list(fields)).with_format(None)
    for first in range(0, len(dataset), DATASET_ROWS_AT_ONCE):
        columns = plain[first : first + DATASET_ROWS_AT_ONCE]
        for number, values in enumerate(zip(*columns.values(), strict=True), first):
            yield partial("row {:,} of the Dataset".format, number), dict(zip(columns, values, strict=True))


def _dataset_values(dataset: Any, field: str) -> Iterator[Any]:
    for batch in dataset.select_columns([field]).with_format(None).iter(DATASET_ROWS_AT_ONCE):
        yield from batch[field]


def _of_table(table: Table, leaves: Collection[str], field: str | Mapping[str, str] | None) -> Column | Chat | Rows:
    """Returns Rows if the table has the leaves of a batch, else the Column with text or tokens, or the Chat."""
    if isinstance(field, str) and "=" in field:
        pairs = [pair.partition("=") for pair in field.split(",")]
        field = {leaf.strip(): name.strip() for leaf, _, name in pairs}
    if isinstance(field, str):
        names = [name.strip() for name in field.split(",")]
        name = next((name for name in names if name in table.fields), "") or _known(table, names[0])
        return chat_of(table, name) or Column(table, name)
    field = field or {}
    if field and not any(leaf in leaves for leaf in field) and (chat := chat_of(table, field)):
        return chat
    if unknown := next((leaf for leaf in field if leaf not in leaves), None):
        message = f"no array of the batch is called '{unknown}', so no field of '{table.name}' can fill it."
        where = f"--field {unknown}={field[unknown]}; fields: {', '.join(table.fields)[:150]}"
        raise UnknownNameError(message, where=where, fix=f"--field ARRAY=FIELD; arrays are {', '.join(leaves)[:150]}")
    if field or all(leaf in table.fields for leaf in leaves):
        fields = {leaf: leaf for leaf in leaves} | dict(field)
        return Rows(table, {leaf: _known(table, name) for leaf, name in fields.items()})
    where = f"it has {', '.join(table.fields)[:150]}; the plan expects {', '.join(leaves)[:150]}"
    column = next((name for name in TEXTS if name in table.fields), None)
    is_windows = set(leaves) == WINDOWS
    if WINDOWS <= set(leaves) and not (is_windows and column) and (chat := chat_of(table, None)):
        return chat
    if column and (is_windows or set(leaves) == PACKED):
        return Column(table, column)
    if WEIGHTED <= set(leaves):
        known = "; ".join(" and ".join(f"'{name}'" for name in fields) for fields in FORMATS.values())
        message = f"'{table.name}' has no conversations, in the fields {known}."
        raise DataError(message, where=where, fix="--field NAME, or --field prompt=NAME,completion=NAME")
    if set(leaves) != WINDOWS:
        missing = next(leaf for leaf in leaves if leaf not in table.fields)
        raise DataError(
            f"'{table.name}' has no field '{missing}'.", where=where, fix=f"--field {missing}=NAME; {OWN_MODEL}"
        )
    raise UnknownNameError(
        f"'{table.name}' has no field 'text' or 'input_ids'.",
        where=where,
        fix=f"--field NAME, the column with the text; {OWN_MODEL}",
    )


def _known(table: Table, field: str) -> str:
    if field not in table.fields:
        raise DataError(f"'{table.name}' has no field '{field}'.", fix=nearest(field, table.fields))
    return field


def _examples(part: Any, destination: Destination, options: Options) -> Examples:
    """Returns the examples of a part from `opened`; raises TooFewExamplesError if there are too few."""
    if isinstance(part, Conversations):
        return conversation_rows(part, destination, options)
    if isinstance(part, Tokens):
        return windows(part, destination, options)
    if isinstance(part, Rows):
        return _row_examples(part, destination, options)
    check_mixable(part, destination)
    return sequence_examples(part, destination, options)


def windows(tokens: Tokens, destination: Destination, options: Options) -> Examples:
    """Returns windows of T + 1 tokens as examples: the first T tokens are the inputs, the last T the targets.

    Consecutive windows overlap by one token.
    """
    leaves = destination.leaves
    batch_size = destination.batch_size
    shapes = {leaf.shape for leaf in leaves}
    kinds = {np.dtype(leaf.dtype).kind for leaf in leaves}
    fits = {leaf.path for leaf in leaves} == WINDOWS and len(shapes) == 1 and kinds <= {"i", "u"}
    if not fits or len(leaves[0].shape) != 2:
        raise DataError(
            "text and tokens provide 'inputs' and 'targets', integers of one shape [B, T], not the leaves of the plan.",
            where=f"{tokens.name}; the plan expects {destination.planned}",
            fix="an iterable of batches with the leaves of the plan",
        )
    ids = tokens.ids
    length = leaves[0].shape[1 - (destination.dims[0] or 0)]
    num_windows = max(0, len(ids) - 1) // length
    if num_windows < options.least(destination):
        raise TooFewExamplesError(
            f"the data has {len(ids):,} tokens, and one batch needs {batch_size * length + 1:,}.",
            where=f"{tokens.name}; a batch of {batch_size} x {length} tokens",
            fix="more data, a smaller batch (--global-batch-size) or shorter sequences (--seq-len)",
        )
    highest = min(int(np.iinfo(leaf.dtype).max) for leaf in leaves)

    def read(indices_R: np.ndarray) -> Leaves:
        windows_RT = ids[indices_R[:, None] * length + np.arange(length + 1)]
        if windows_RT.max(initial=0) > highest:
            raise DataError(f"token {windows_RT.max()} does not fit the plan's {leaves[0].dtype}.", where=tokens.name)
        parts = {"inputs": windows_RT[:, :-1], "targets": windows_RT[:, 1:]}
        return {leaf.path: parts[leaf.path].astype(leaf.dtype) for leaf in leaves}

    return Examples(tokens.name, {"inputs": None, "targets": None}, num_windows, read, tokens)


def _row_examples(rows: Rows, destination: Destination, options: Options) -> Examples:
    """Returns the rows of a table as examples: those of files from the cache, those of a dataset from itself."""
    table = rows.table
    name = f"{table.name} {table.split} {table.digest}"
    destination.check_examples(name)
    like = _nested_like([leaf.path for leaf in destination.leaves])
    if rows.dataset is not None:
        dataset = rows.dataset if rows.dataset.format["type"] else rows.dataset.with_format("numpy")

        def read_dataset(indices_R: np.ndarray) -> Leaves:
            columns = dataset[indices_R.tolist()]
            items = [{leaf: columns[field][i] for leaf, field in rows.fields.items()} for i in range(len(indices_R))]
            return destination.stacked(items, name)

        check_enough(name, len(dataset), destination, options)
        read_dataset(np.zeros(1, np.int64))  # raises before the first step if an example does not match
        return Examples(name, like, len(dataset), read_dataset)
    arrays: Leaves = {}
    for leaf, dim in zip(destination.leaves, destination.dims, strict=True):
        field = rows.fields[leaf.path]
        shape = example_shape(leaf, dim)
        values = table.values(field)
        items = ((is_held_out, conform_array(leaf, [shape], value, name)[None]) for is_held_out, value in values)
        arrays[leaf.path] = table.stored(f"{field} {leaf.path} {shape}", np.dtype(leaf.dtype), items, options.cache_dir)
    num_rows = min(map(len, arrays.values()))
    check_enough(name, num_rows, destination, options)
    return Examples(name, like, num_rows, lambda indices_R: {path: rows[indices_R] for path, rows in arrays.items()})


def _nested_like(paths: Sequence[str]) -> Any:
    """Returns the pytree of leaf paths: dicts, tuples if the keys are 0, 1, ..., or a single leaf."""
    if list(paths) in (["batch"], [""]):
        return None
    keys = dict.fromkeys(path.partition(".")[0] for path in paths)
    inner = {key: [path.partition(".")[2] for path in paths if path.partition(".")[0] == key] for key in keys}
    children = {key: _nested_like(inner_paths) for key, inner_paths in inner.items()}
    return tuple(children.values()) if list(children) == [str(i) for i in range(len(children))] else children
