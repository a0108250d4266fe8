"""Prompts from chat templates of Hugging Face."""

from pathlib import Path
from typing import Any

from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.names import OF_TOKENIZER, TOKENIZER_CONFIG
from spanax.errors import FormatError, MissingError, NotInstalledError, first_line
from spanax.train.data.text.tokenizer import token_text

TEMPLATE = OF_TOKENIZER[-1]
"""The file of a template on its own; others are in tokenizer_config.json."""


def chat_prompt(folder: Path | None, text: str) -> str:
    """Returns the prompt of a conversation with one message of the user.

    Args:
      folder: a folder of imported weights.
      text: the message.

    Raises:
      SpanaxError: the folder has no template, the template does not accept the message, or Jinja is not installed.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise NotInstalledError("--chat requires Jinja.", fix='pip install "spanax[chat]"') from None

    config = _config(folder)
    template = _template(folder, config)
    if template is None:
        where = "" if folder is None else f"{folder / TOKENIZER_CONFIG} has no chat_template"
        raise MissingError("the model has no chat template.", where=where, fix="leave --chat out")
    texts = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    tokens = {name: text if isinstance(text, str) else "" for name, text in texts.items()}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    messages = [{"role": "user", "content": text}]
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except TemplateError as error:
        raise FormatError("the chat template does not accept the prompt.", where=first_line(error)) from None


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _config(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / TOKENIZER_CONFIG).exists():
        return {}
    config = parse_json(Folder.of(folder).read(TOKENIZER_CONFIG))
    return config if isinstance(config, dict) else {}


def _template(folder: Path | None, config: dict[str, Any]) -> str | None:
    if folder is not None and (folder / TEMPLATE).exists():
        return Folder.of(folder).read(TEMPLATE).decode()
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
