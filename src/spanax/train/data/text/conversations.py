"""Conversations of a table, recognized by its fields, as token ids that say which of them a model has to write."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from spanax.errors import DataError
from spanax.sealed import digest
from spanax.train.data.formats.table import Table
from spanax.train.data.text.chat_template import ASSISTANT, ChatTemplate, ConversationError, Pieces, required
from spanax.train.data.text.tokenizer import GROUP_CHARS, Tokenizer, TrainingText, begin_ids, encoding_errors
from spanax.train.data.text.tokens import Column, Tokens

if TYPE_CHECKING:
    import tokenizers

MESSAGES = "messages"
SHAREGPT = "conversations"
ALPACA = "instruction"
PROMPT = "prompt"

FORMATS = {
    MESSAGES: (MESSAGES,),
    SHAREGPT: (SHAREGPT,),
    ALPACA: (ALPACA, "output"),
    PROMPT: (PROMPT, "completion"),
}
"""The fields of each format: OpenAI's, ShareGPT's, Alpaca's, whose `input` may be missing, and texts after texts."""

INPUT = "input"

ROLES = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT, ASSISTANT: ASSISTANT,
    "system": "system", "tool": "tool", "function": "tool",
}  # fmt: skip
"""The roles of ShareGPT's `from`."""

COUNTS = np.uint32(1 << 30)
BEGINS = np.uint32(1 << 31)
IDS = np.uint32((1 << 30) - 1)
"""The bits of a stored token: whether a model has to write it, whether it is the first of a conversation, its id."""

Message = Mapping[str, str]

Divided = tuple[bool, Callable[[], str], Pieces]
"""Whether a conversation is held out, where it is, and its pieces."""


@dataclass(frozen=True)
class Conversations(Tokens):
    """The conversations of one split.

    `ids` have the bits above. `place` returns where the conversation of an index is, for an error.
    """

    template: ChatTemplate | None = None
    place: Callable[[int], str] = str

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each conversation begins, and the end of the last, of shape [N + 1]."""
        return np.append(np.flatnonzero(self.ids & BEGINS), len(self.ids))


@dataclass(frozen=True)
class Documents(Conversations):
    """The documents of one split, of which every token counts but the first."""

    @cached_property
    def vocab_size(self) -> int:
        """The size of the smallest vocabulary with every id."""
        return replace(self, ids=self.ids & IDS).vocab_size if self.tokenizer is None else self.tokenizer.vocab_size


def documents_of(
    column: Column, tokenizer: Tokenizer | None, cache_dir: str | os.PathLike[str] | None = None
) -> Documents:
    """Returns the texts or token ids of a column, each row apart; `tokenizer` is None for token ids.

    Raises:
      DataError: an id does not fit beside the bits.
    """
    table = column.table
    encoding = tokenizer.name if tokenizer else "ids"
    settings = f"documents {column.field} {encoding} {tokenizer and tokenizer.end_id} {table.holds_out}"
    ids = table.stored(settings, np.dtype(np.uint32), _marked(column, tokenizer), cache_dir)
    name = f"{table.name}[{column.field}] documents, {table.split} {encoding} {digest(table.digest, settings)}"
    return Documents(name, ids, tokenizer)


def _marked(column: Column, tokenizer: Tokenizer | None) -> Iterator[tuple[bool, np.ndarray]]:
    """Yields the ids of documents, with bits."""
    begins = True
    for is_held_out, is_last, ids in column.documents(tokenizer):
        if len(ids) and ids.max() > IDS:
            raise DataError(f"token {ids.max():,} of '{column.table.name}' is above {IDS:,}.", fix="smaller token ids")
        marked = ids.astype(np.uint32) | COUNTS
        if begins and len(marked):
            marked[0] ^= COUNTS | BEGINS
        begins = is_last or (begins and not len(marked))
        yield is_held_out, marked


@dataclass(frozen=True)
class Chat:
    """A table of conversations: its format, and its field for each field of the format."""

    table: Table
    format: str
    fields: Mapping[str, str]

    @property
    def training_text(self) -> TrainingText:
        """The messages, for training a tokenizer."""
        contents = (m["content"].encode() for is_held_out, _, row in self._read() if not is_held_out for m in row)
        return TrainingText((self.table.digest, self.format), self.table.size_bytes, contents)

    def tokens(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, cache_dir: str | os.PathLike[str] | None = None
    ) -> Conversations:
        """Returns the conversations of the table's split, encoded once.

        Args:
          tokenizer: the tokenizer.
          template: the chat template; a prompt and its completion also do without.
          cache_dir: as in `batches`.

        Raises:
          MissingError: there is no template.
          DataError: a row has no conversation in which the assistant writes something.
        """
        table = self.table
        if self.format != PROMPT:
            where = f"'{table.name}' has {', '.join(self.fields.values())}, and the tokenizer no template"
            required(template, where, "--chat-template chatml, or the path of a Jinja template")
        style = "" if template is None else template.digest
        settings = f"{dict(self.fields)} {tokenizer.name} {tokenizer.end_id} {style} {table.holds_out}"
        ids = table.stored(settings, np.dtype(np.uint32), self._encoded(tokenizer, template), cache_dir)
        fields = ", ".join(self.fields.values())
        name = f"{table.name}[{fields}] {table.split} {tokenizer.name} {digest(table.digest, settings)}"
        return Conversations(name, ids, tokenizer, template, self._place)

    def _place(self, index: int) -> str:
        """Returns where the conversation of an index in the split is."""
        is_of_split = self.table.holds_out and self.table.split == "validation"
        places = (where for is_held_out, where, _ in self._rows() if is_held_out == is_of_split)
        return next(islice(places, index, None))()

    def _rows(self) -> Iterator[tuple[bool, Callable[[], str], dict[str, Any]]]:
        """Yields every row by the fields of the format, whether it is held out, and where it is."""
        for number, (where, row) in enumerate(self.table.objects([*self.fields.values()])):
            yield self.table.is_held_out(number), where, {ours: row.get(own) for ours, own in self.fields.items()}

    def _read(self) -> Iterator[tuple[bool, Callable[[], str], Sequence[Message]]]:
        """Yields the messages of every row, whether it is held out, and where it is."""
        for is_held_out, where, row in self._rows():
            try:
                messages = messages_of(self.format, row)
            except ConversationError as error:
                raise _bad(where, error) from None
            yield is_held_out, where, messages

    def _encoded(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[tuple[bool, np.ndarray]]:
        """Yields the ids of every row."""
        encoder = _Encoder.of(tokenizer, is_plain=template is None)
        group: list[Divided] = []
        num_chars = 0
        for is_held_out, where, messages in self._read():
            try:
                pieces = _plain(messages, tokenizer) if template is None else template.pieces(messages)
            except ConversationError as error:
                raise _bad(where, error) from None
            group.append((is_held_out, where, pieces))
            num_chars += sum(len(piece) for _, piece in pieces)
            if num_chars >= GROUP_CHARS:
                yield from encoder.encoded(group)
                group = []
                num_chars = 0
        yield from encoder.encoded(group)


def chat_of(table: Table, field: str | Mapping[str, str] | None) -> Chat | None:
    """Returns the conversations of a table, by the names of its fields; None if it has none.

    Args:
      table: the table.
      field: the field of conversations, or the field of the table for each field of the format.
    """
    if isinstance(field, str):
        first = next((row.get(field) for _, row in table.objects([field])), None)
        keys = first[0] if isinstance(first, list) and first and isinstance(first[0], dict) else {}
        format = SHAREGPT if "from" in keys else MESSAGES
        return Chat(table, format, {format: field}) if keys else None
    named = dict(field or {})
    for format, fields in FORMATS.items():
        known = fields if format != ALPACA else (*fields, INPUT)
        chosen = {each: named.get(each, each) for each in known}
        if set(named) <= set(known) and all(chosen[each] in table.fields for each in fields):
            return Chat(table, format, {each: own for each, own in chosen.items() if own in table.fields})
    return None


def messages_of(format: str, row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns the messages of a row, each with a role and a content.

    Raises:
      ConversationError: a field is missing or has another type, or the assistant writes nothing.

    Example:
      >>> messages_of("instruction", {"instruction": "Add.", "input": "1 + 1", "output": "2"})[0]
      {'role': 'user', 'content': 'Add.\\n\\n1 + 1'}
    """
    if format in (ALPACA, PROMPT):
        asked, answered = (_text(row, field) for field in FORMATS[format])
        more = row.get(INPUT)
        if more:
            asked = f"{asked}\n\n{_text(row, INPUT)}"
        return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": answered}]
    (field,) = FORMATS[format]
    given = row.get(field)
    if isinstance(given, str):  # in a CSV file
        try:
            given = json.loads(given)
        except ValueError:
            raise ConversationError(f"'{field}' is a text that is not JSON") from None
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise ConversationError(f"'{field}' is {_kind(given)}, not a list of messages")
    if not given:
        raise ConversationError(f"'{field}' has no message")
    role, content = ("role", "content") if format == MESSAGES else ("from", "value")
    messages = []
    for index, message in enumerate(given):
        texts = {name: _text(message, name, f"'{field}', message {index}: ") for name in (role, content)}
        name = texts[role] if format == MESSAGES else ROLES.get(texts[role])
        if name is None:
            raise ConversationError(f"'{field}', message {index}: the role '{texts[role][:40]}' is unknown")
        messages.append({"role": name, "content": texts[content]})
    if all(message["role"] != ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ConversationError(f"'{field}' has no message of the assistant, only of: {roles[:80]}")
    return messages


def _text(row: Mapping[str, Any], field: str, where: str = "") -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise ConversationError(f"{where}'{field}' is {_kind(value)}, not a text")
    return value


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _plain(messages: Sequence[Message], tokenizer: Tokenizer) -> Pieces:
    """Returns a prompt and its completion, which ends with a newline if the tokenizer has no end-of-text token."""
    asked, answered = (message["content"] for message in messages)
    return [(False, asked), (True, answered + ("\n" if tokenizer.end_id is None else ""))]


def _bad(where: Callable[[], str], error: ConversationError) -> DataError:
    return DataError(f"{where()}: {error}.", fix="correct the row, or remove it; see Chat in docs/data.md")


@dataclass(frozen=True, eq=False)
class _Encoder:
    """Encodes conversations.

    Attributes:
      name: the name of the tokenizer.
      engine: the tokenizer, which adds nothing to a text and gives every character of it to a token.
      begin: the ids before each text.
      end: the ids after it, with bits.
    """

    name: str
    engine: "tokenizers.Tokenizer"
    begin: np.ndarray
    end: np.ndarray

    @staticmethod
    def of(tokenizer: Tokenizer, *, is_plain: bool) -> "_Encoder":
        """Returns the encoder of texts with or without a template, which writes the special tokens itself."""
        from tokenizers import Tokenizer as Engine

        text = tokenizer.to_json()
        engine = Engine.from_str(json.dumps(json.loads(text) | {"post_processor": None, "truncation": None}))
        begin = begin_ids(Engine.from_str(text)) if is_plain else ()
        end = [tokenizer.end_id | COUNTS] if is_plain and tokenizer.end_id is not None else []
        return _Encoder(tokenizer.name, engine, np.array(begin, np.uint32), np.array(end, np.uint32))

    def encoded(self, group: Sequence[Divided]) -> Iterator[tuple[bool, np.ndarray]]:
        """Yields the ids of conversations, with bits."""
        texts = ["".join(piece for _, piece in pieces) for _, _, pieces in group]
        with encoding_errors(self.name):
            encodings = self.engine.encode_batch(texts, add_special_tokens=False)
        for (is_held_out, where, pieces), encoding in zip(group, encodings, strict=True):
            ids = np.array(encoding.ids, np.uint32)
            for first, last in _counted(encoding, pieces):
                ids[first:last] |= COUNTS
            ids = np.concatenate([self.begin, ids, self.end])
            if not (ids[1:] & COUNTS).any():
                raise _bad(where, ConversationError("no token counts in the loss: the assistant writes nothing"))
            ids[0] |= BEGINS
            yield is_held_out, ids


def _counted(encoding: Any, pieces: Iterable[tuple[bool, str]]) -> Iterator[tuple[int, int]]:
    """Yields the first token of each piece that counts, and the first after it."""
    place = 0
    total = sum(len(piece) for _, piece in pieces)
    for counts, piece in pieces:
        begin, place = place, place + len(piece)
        if counts and piece:
            yield _token_at(encoding, begin, total), _token_at(encoding, place, total)


def _token_at(encoding: Any, place: int, total: int) -> int:
    """Returns the index of the token with the character at a place, or of the next one: some tokenizers drop spaces."""
    found = (encoding.char_to_token(each) for each in range(place, total))
    return next((token for token in found if token is not None), len(encoding.ids))
