"""Decides what a path of the user is: files of this machine, and no URLs."""

import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from spanax.errors import FormatError

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)", re.DOTALL)
"""`pathlib` joins slashes, so a `Path` of `s3://b/x` is `s3:/b/x`. A scheme of one letter is a drive."""

_TEXTS = (
    "workload", "plan", "data", "tokenizer", "chat_template", "output_dir", "init", "config", "sample_prompts", "on",
    "logs",
)  # fmt: skip
"""The flags with a path, or a name, as text."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Returns a path of the user.

    Raises:
      SpanaxError: it is a URL.

    Example:
      >>> local_path("runs/a:b")
      PosixPath('runs/a:b')
      >>> local_path("gs://bucket/runs")
      Traceback (most recent call last):
      spanax.errors.FormatError: 'gs://bucket/runs' is a URL, and has to be a path on this machine. [SPX103]
        fix: mount the bucket or copy its files, and pass their path
    """
    text = os.fspath(path)
    if ":/" in text:  # a URL that was made absolute follows the working directory
        text = text.removeprefix(f"{os.getcwd()}/")
    url = _URL.match(text)
    if url is None:
        return Path(path)
    is_file = url["scheme"].lower() == "file"
    raise FormatError(
        f"'{url['scheme']}://{'/' if is_file else ''}{url['rest']}' is a URL, and has to be a path on this machine.",
        fix=f"/{unquote(url['rest'])}" if is_file else "mount the bucket or copy its files, and pass their path",
    )


def check_local_paths(flags: Any) -> None:
    """Checks that no path among the flags of a command is a URL.

    Raises:
      SpanaxError: one is.
    """
    for field in fields(flags):
        value = getattr(flags, field.name)
        if is_dataclass(value):
            check_local_paths(value)
        elif isinstance(value, str) and field.name in _TEXTS:
            value = tuple(value.split(","))  # a mixture of data
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path) or field.name in _TEXTS and path is not None:
                local_path(path)
