"""Conversations: the same tokens from each format and kind of table, both splits, and rows that are refused."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from spanax.errors import SpanaxError
from spanax.train.data.open_source import WINDOWS, opened
from spanax.train.data.source import Options
from spanax.train.data.text.chat_template import ChatTemplate
from spanax.train.data.text.conversations import BEGINS, COUNTS, IDS, Conversations
from spanax.train.data.text.tokenizer import load_tokenizer

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
N = 45
ASKED = [(f"q{i}é", f"x{i}" * (i % 2), f"answer {i}") for i in range(N)]


def question(asked: str, more: str) -> str:
    return f"{asked}\n\n{more}" if more else asked


FORMATS: dict[str, list[dict[str, Any]]] = {
    "openai": [
        {"messages": [{"role": "user", "content": question(a, b)}, {"role": "assistant", "content": c}]}
        for a, b, c in ASKED
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": question(a, b)}, {"from": "gpt", "value": c}]}
        for a, b, c in ASKED
    ],
    "alpaca": [{"instruction": a, "input": b, "output": c} for a, b, c in ASKED],
    "prompts": [{"prompt": question(a, b), "completion": c} for a, b, c in ASKED],
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def conversations(source: Any, tmp_path: Path, **options: Any) -> Conversations:
    settings = {"chat_template": TEMPLATE, "cache_dir": tmp_path / "cache", **options}
    ((part, _),) = opened(source, WINDOWS, Options(**settings))
    assert isinstance(part, Conversations)
    return part


def texts(part: Conversations) -> list[tuple[str, str]]:
    """The text of each conversation, and what of it counts."""
    each = np.split(part.ids, part.starts[1:-1])
    decoded = lambda ids: bytes((ids & IDS).tolist()).decode()  # noqa: E731
    assert all(ids[0] & BEGINS and not (ids[1:] & BEGINS).any() for ids in each)
    return [(decoded(ids), decoded(ids[(ids & COUNTS) != 0])) for ids in each]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_table_has_the_same_conversations(name: str, suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"chat.{suffix}", FORMATS[name])
    expected = [(f"u:{question(a, b)};a:{c};", f"{c};") for a, b, c in ASKED]
    held_out = [row for index, row in enumerate(expected) if index % 20 == 1]
    assert texts(conversations(path, tmp_path)) == [row for row in expected if row not in held_out]
    part = conversations(path, tmp_path, split="validation")
    assert texts(part) == held_out and part.tokenizer.name == "bytes" and part.template == TEMPLATE


def test_a_dataset_has_them_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason='pip install "spanax[datasets]"')
    expected = [(f"u:{question(a, b)};a:{c};", f"{c};") for a, b, c in ASKED]
    for rows in FORMATS.values():
        assert texts(conversations(datasets.Dataset.from_list(rows), tmp_path)) == expected
    bad = datasets.Dataset.from_list([*FORMATS["openai"], {"messages": []}])
    with pytest.raises(SpanaxError, match=r"row 45 of the Dataset: 'messages' has no message"):
        conversations(bad, tmp_path)


def test_a_prompt_has_no_template_unless_one_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FORMATS["prompts"])
    part = conversations(path, tmp_path, chat_template=None)
    a, b, c = ASKED[0]
    assert texts(part)[0] == (f"{question(a, b)}{c}\n", f"{c}\n") and part.template is None
    named = write(tmp_path / "b.jsonl", [{"question": a, "answer": c, "messages": 1} for a, _, c in ASKED])
    part = conversations(named, tmp_path, chat_template=None, field="prompt=question,completion=answer")
    assert texts(part)[0] == (f"{a}{c}\n", f"{c}\n")


def test_a_field_is_named_and_a_text_stays_a_text(tmp_path: Path) -> None:
    rows = [{"text": "a", "talk": row["messages"], "messages": row["messages"]} for row in FORMATS["openai"]]
    path = write(tmp_path / "a.jsonl", rows)
    assert len(conversations(path, tmp_path, field="talk").starts) == 42 + 1
    ((part, _),) = opened(path, WINDOWS, Options(cache_dir=tmp_path / "cache"))
    assert not isinstance(part, Conversations) and bytes(part.ids[:4]) == b"a\na\n"
    ((part, _),) = opened(path, {*WINDOWS, "weights"}, Options(chat_template="chatml", cache_dir=tmp_path / "cache"))
    assert isinstance(part, Conversations)
    part = conversations(path, tmp_path, field="talk", tokenizer="bpe:300")  # trained on the messages
    assert part.vocab_size <= 300 and part.starts[-1] < conversations(path, tmp_path, field="talk").starts[-1]


def row(**message: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "a"}
    return {"messages": [{"role": "user", "content": "q"}, {**answer, **message}]}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"messages": []}, "'messages' has no message"),
        ({"messages": None}, "'messages' is missing, not a list of messages"),
        ({"other": 1}, "'messages' is missing, not a list of messages"),
        ({"messages": ["a"]}, "'messages' is a list, not a list of messages"),
        (row(role="user"), "'messages' has no message of the assistant, only of: user"),
        (row(content=None), "'messages', message 1: 'content' is missing, not a text"),
        (row(content=[{"type": "text"}]), "'messages', message 1: 'content' is a list, not a text"),
        (row(role=3), "'messages', message 1: 'role' is a int, not a text"),
        (row(role="critic"), "has no message of the assistant"),
    ],
)
def test_a_bad_conversation_is_refused_with_its_line(bad: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["", *(json.dumps(each) for each in (row(), row(), bad))]))
    with pytest.raises(SpanaxError) as caught:
        conversations(path, tmp_path)
    assert f"'{path}', line 4: " in str(caught.value) and why in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.npy"))


def test_other_bad_input_is_refused(tmp_path: Path) -> None:
    chat = write(tmp_path / "a.jsonl", FORMATS["openai"])
    with pytest.raises(SpanaxError, match=r"has no chat template.*SPX105.*\n.*'a.jsonl' has messages, and.*\n.*chatml"):
        conversations(chat, tmp_path, chat_template=None)
    silent = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(SpanaxError, match="no token counts in the loss"):
        conversations(chat, tmp_path, chat_template=silent)
    unknown = write(tmp_path / "b.jsonl", [{"conversations": [{"from": "bing", "value": "a"}]}])
    with pytest.raises(SpanaxError, match="line 1: 'conversations', message 0: the role 'bing' is unknown"):
        conversations(unknown, tmp_path)
    strict = ChatTemplate("{% for m in messages %}{{ raise_exception('no ' + m.role) }}{% endfor %}")
    with pytest.raises(SpanaxError, match="line 1: the chat template does not accept it: no user"):
        conversations(chat, tmp_path, chat_template=strict)
    number = write(tmp_path / "c.parquet", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}])
    with pytest.raises(SpanaxError, match=r"row 1 of '.*c.parquet': 'completion' is missing"):
        conversations(number, tmp_path)
    table = write(tmp_path / "d.csv", [{"messages": "no JSON"}])
    with pytest.raises(SpanaxError, match="'messages' is a text that is not JSON"):
        conversations(table, tmp_path)
    with pytest.raises(SpanaxError, match="has no conversations, in the fields 'messages'; "):
        opened(write(tmp_path / "e.jsonl", [{"a": 1}]), {*WINDOWS, "weights"}, Options())


def test_a_tokenizer_that_begins_texts_begins_a_plain_prompt(tmp_path: Path) -> None:
    import tokenizers

    engine = tokenizers.Tokenizer.from_str(load_tokenizer("bytes").to_json())
    engine.add_special_tokens(["<s>", "</s>"])
    engine.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('a prompt has none') }}")
    path = write(tmp_path / "a.jsonl", [{"prompt": "é ", "completion": "b"}, {"prompt": "", "completion": ""}])
    part = conversations(path, tmp_path, chat_template=None, tokenizer=str(tmp_path / "tokenizer.json"))
    assert (part.ids & IDS).tolist() == [256, *"é b".encode(), 257]
    assert np.flatnonzero(part.ids & COUNTS).tolist() == [4, 5]
