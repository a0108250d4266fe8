"""Chat templates: what the assistant writes, as transformers marks it, templates of files, and what is refused."""

import json
from pathlib import Path

import pytest
import tokenizers

from spanax.errors import SpanaxError
from spanax.train.data.text.chat_template import (
    BUILT_IN,
    ChatTemplate,
    ConversationError,
    load_template,
    recorded_template,
    template_of,
)
from spanax.train.data.text.conversations import COUNTS, IDS, _Encoder
from spanax.train.data.text.tokenizer import load_tokenizer

SAID = (("system", "é"), ("user", "1+1?"), ("assistant", "2 日"), ("user", "sure"), ("assistant", ""), ("user", "?"),
        ("assistant", " yes\n"))  # fmt: skip
MESSAGES = [{"role": role, "content": content} for role, content in SAID]

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TOKENS = {"eos_token": "<|im_end|>"}

MASKED = {35: 6, 65: 1, 87: 6}
"""The first token and the number of tokens that count, by `apply_chat_template(return_assistant_tokens_mask=True)` of
transformers 5.24.0 for `MARKED`, of the 94 tokens of `MESSAGES`."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes with two special tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(load_tokenizer("bytes").to_json())
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    # As GPT-2's, which gives spaces to no token.
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    return tmp_path


@pytest.mark.parametrize("text", [MARKED, UNMARKED, BUILT_IN["chatml"]])
def test_what_counts_is_what_transformers_marks(text: str, folder: Path) -> None:
    template = ChatTemplate(text, TOKENS)
    encoder = _Encoder.of(load_tokenizer(str(folder / "tokenizer.json")), is_plain=False)
    ((_, ids),) = encoder.encoded([(False, str, template.pieces(MESSAGES))])
    # Without marks, the line break after an answer is a part of it.
    more = text == UNMARKED
    expected = [each for first, count in MASKED.items() for each in range(first, first + count + more)]
    assert [index for index, each in enumerate(ids) if each & COUNTS] == expected
    assert len(ids) == 94 and (ids & IDS)[:12].tolist() == [257, *b"system\n", 195, 169, 256, 10]
    assert template.end == "<|im_end|>"


def test_a_template_is_that_of_the_flag_or_of_the_tokenizer(folder: Path) -> None:
    path = str(folder / "tokenizer.json")
    tokenizer = load_tokenizer(path)
    assert template_of(folder) is None and load_template(None, tokenizer, path) is None
    assert load_template(None, load_tokenizer("bytes"), "bytes") is None
    chatml = load_template("chatml", tokenizer, path)
    assert chatml == ChatTemplate(BUILT_IN["chatml"], TOKENS) and load_template(chatml, tokenizer, path) is chatml
    assert recorded_template(chatml.record) == chatml and recorded_template({}) is None
    bare = load_template("chatml", load_tokenizer("bytes"), "bytes")
    assert bare.prompt("a") == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "of the config"}], "bos_token": "<s>"})
    )
    assert load_template(None, tokenizer, path) == ChatTemplate("of the config", {"bos_token": "<s>"})
    (folder / "chat_template.jinja").write_text("of its own")
    assert load_template(None, tokenizer, path).text == "of its own"
    assert load_template(str(folder / "chat_template.jinja"), tokenizer, path).text == "of its own"
    (folder / "tokenizer_config.json").unlink()
    assert load_template("chatml", load_tokenizer(path), path).tokens == {}  # no config, and no usual name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}",
         "does not accept it: no system"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}",
         "leaves out a message of role 'system'"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}|{% endfor %}", "message 2 changes with those"),
        ("{{ messages[9].role }}", "does not accept it"),
    ],
)  # fmt: skip
def test_a_conversation_that_a_template_cannot_divide_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConversationError, match=why):
        ChatTemplate(text).pieces(MESSAGES)
    with pytest.raises(ConversationError, match=r"U\+FDD0"):
        ChatTemplate(MARKED).pieces([{"role": "assistant", "content": "\ufdd0"}])


def test_what_is_no_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpanaxError, match="not one of Jinja"):
        ChatTemplate("{% for").prompt("a")
    with pytest.raises(SpanaxError, match="does not accept the prompt"):
        ChatTemplate("{{ raise_exception('no') }}").prompt("a")
    (tmp_path / "binary").write_bytes(b"\xff")
    for name in (tmp_path / "binary", tmp_path / "nowhere"):
        with pytest.raises(SpanaxError, match="cannot read the chat template"):
            load_template(str(name), load_tokenizer("bytes"), "bytes")
