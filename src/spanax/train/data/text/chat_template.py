"""Chat templates of Hugging Face: conversations as text, and which parts of it a model has to write."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from spanax.documents import parse_json, read_bytes
from spanax.entries.folder import Folder
from spanax.entries.local_path import local_path
from spanax.entries.names import OF_TOKENIZER, TOKENIZER_CONFIG
from spanax.errors import DataError, FileError, MissingError, NotInstalledError, first_line
from spanax.sealed import digest
from spanax.train.data.text.tokenizer import Tokenizer, token_text

TEMPLATE = OF_TOKENIZER[-1]
"""The file of a template on its own; others are in tokenizer_config.json."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

ASSISTANT = "assistant"

CHATML = "chatml"
BUILT_IN = {
    CHATML: "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token or '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content }}{{ eos_token or '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
}
"""Templates by name. ChatML's turns end with the end-of-text token, which ends a generation, if there is one."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_MARK = "\ufdd0"
"""A code point that Unicode reserves for a program's own use, before and after what a model writes."""

Pieces = Sequence[tuple[bool, str]]
"""The parts of a text in order, and whether a model has to write each."""


class ConversationError(ValueError):
    """A conversation cannot be read, for the reason of the message; a DataError adds its file and line."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens that it may write.

    Example:
      >>> template = ChatTemplate(BUILT_IN["chatml"], {"eos_token": "<end>"})
      >>> template.prompt("Hi")
      '<|im_start|>user\\nHi<end>\\n<|im_start|>assistant\\n'
      >>> template.pieces([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}])[1]
      (True, 'Yes?<end>')
    """

    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, str]:
        """The texts to record of a run; see `recorded_template`."""
        return {"template": self.text, **self.tokens}

    @property
    def digest(self) -> str:
        """A hash of the template and its special tokens."""
        return digest(self.text, *(f"{name} {text}" for name, text in sorted(self.tokens.items())))

    def prompt(self, text: str) -> str:
        """Returns the prompt of a conversation with one message of the user.

        Raises:
          SpanaxError: the template does not accept the message, or Jinja is not installed.
        """
        try:
            return self._rendered([{"role": "user", "content": text}], True).replace(_MARK, "")
        except ConversationError as error:
            raise DataError("the chat template does not accept the prompt.", where=first_line(error)) from None

    @cached_property
    def end(self) -> str:
        """What the assistant writes after a message, which ends a generation; empty if that is white space alone."""
        messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "\ufdd1"}]
        try:
            written = "".join(piece for is_written, piece in self.pieces(messages) if is_written)
            return written.partition("\ufdd1")[2].strip()
        except ConversationError:
            return ""

    def pieces(self, messages: Sequence[Mapping[str, str]]) -> Pieces:
        """Returns a conversation in pieces: what the assistant writes, and what is before and between.

        Raises:
          ConversationError: the template does not accept the conversation, or it cannot be divided.
        """
        if any(_MARK in message["content"] for message in messages):
            raise ConversationError("a message has the code point U+FDD0, which is no character")
        whole = self._rendered(messages)
        for message in messages:
            if message["role"] != ASSISTANT and message["content"].strip() not in whole:
                raise ConversationError(f"the chat template leaves out a message of role '{message['role']}'")
        if _GENERATION.search(self.text):
            return [(bool(index % 2), piece) for index, piece in enumerate(whole.split(_MARK))]
        ends = [0]
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                ends += [len(prefix) for prefix in self._prefixes(messages, index, whole)]
        ends.append(len(whole))
        return [(bool(index % 2), whole[start:stop]) for index, (start, stop) in enumerate(pairwise(ends))]

    def _prefixes(self, messages: Sequence[Mapping[str, str]], index: int, whole: str) -> Iterator[str]:
        """Yields the text before and through a message of the assistant."""
        for number, is_prompt in ((index, True), (index + 1, False)):
            prefix = self._rendered(messages[:number], is_prompt)
            if not whole.startswith(prefix):
                raise ConversationError(
                    f"message {index} changes with those after it, so what the assistant writes is unknown: mark it by "
                    "{% generation %} in the template"
                )
            yield prefix

    def _rendered(self, messages: Sequence[Mapping[str, str]], is_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        template = self._template
        try:
            return str(template.render(messages=messages, add_generation_prompt=is_prompt, **self.tokens))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ConversationError(f"the chat template does not accept it: {first_line(error)}") from None

    @cached_property
    def _template(self) -> Any:
        """The compiled template."""
        try:
            from jinja2 import TemplateError, nodes
            from jinja2.ext import Extension
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise NotInstalledError("chat templates require Jinja.", fix='pip install "spanax[chat]"') from None

        class Generation(Extension):
            """Marks what a block of `{% generation %}` writes."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                mark = nodes.Output([nodes.TemplateData(_MARK)])
                return nodes.Scope([mark, *body, mark], lineno=line)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.text)
        except TemplateError as error:
            raise FileError("the chat template is not one of Jinja.", where=first_line(error)) from None


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def template_of(folder: Path) -> ChatTemplate | None:
    """Returns the template of the tokenizer in a folder; None if it has none."""
    config = _config(folder)
    text = config.get("chat_template")
    if isinstance(text, list):  # several by name
        named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
        text = named.get("default")
    if (folder / TEMPLATE).exists():
        text = Folder.of(folder).read(TEMPLATE).decode()
    return ChatTemplate(text, _special(config)) if isinstance(text, str) else None


def recorded_template(record: Mapping[str, str]) -> ChatTemplate | None:
    """Returns the template of which `ChatTemplate.record` was recorded; None without one."""
    tokens = {name: text for name, text in record.items() if name in SPECIAL_TOKENS}
    return ChatTemplate(record["template"], tokens) if "template" in record else None


def load_template(name: str | ChatTemplate | None, tokenizer: Tokenizer, path: str) -> ChatTemplate | None:
    """Returns a template by name or from a file, or that of a tokenizer; None if it has none.

    Args:
      name: `chatml`, the path of a file, or a template; None for that of the tokenizer.
      tokenizer: writes the end-of-text token.
      path: the tokenizer.json, or the name of a tokenizer without files.

    Raises:
      DataError: the file cannot be read.
    """
    if isinstance(name, ChatTemplate):
        return name
    folder = Path(path).parent if path.endswith(".json") else None
    if name is None:
        return None if folder is None else template_of(folder)
    text = BUILT_IN.get(name)
    if text is None:
        try:
            text = read_bytes(local_path(name)).decode()
        except (OSError, ValueError) as error:
            raise FileError(
                f"cannot read the chat template '{name}'.",
                where=first_line(error),
                fix="chatml, or the path of a Jinja template",
            ) from None
    tokens = {} if folder is None else _special(_config(folder))
    if tokenizer.engine is not None and tokenizer.end_id is not None:
        tokens.setdefault("eos_token", str(tokenizer.engine.id_to_token(tokenizer.end_id)))
    return ChatTemplate(text, tokens)


def required(template: ChatTemplate | None, where: str, fix: str) -> ChatTemplate:
    """Returns a template, if there is one.

    Raises:
      MissingError: there is none.
    """
    if template is None:
        raise MissingError("the model has no chat template.", where=where, fix=fix)
    return template


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / TOKENIZER_CONFIG).exists():
        return {}
    config = parse_json(Folder.of(folder).read(TOKENIZER_CONFIG))
    return config if isinstance(config, dict) else {}


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: token_text(config.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
