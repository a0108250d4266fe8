"""Prompts: texts that a model continues, one per line of a file."""

import sys

from spanax.documents import read_bytes
from spanax.errors import FileError

STDIN = "-"
"""What stands for standard input in place of a file."""


def read_prompts(path: str) -> list[str]:
    """Returns the lines of a file of prompts, or of standard input, without blank ones.

    Raises:
      DataError: it cannot be read, or has no prompt.
    """
    try:
        content = sys.stdin.read() if path == STDIN else read_bytes(path).decode()
        prompts = [line for line in content.splitlines() if line.strip()]
        if not prompts:
            raise ValueError("every line is blank")
    except (OSError, ValueError) as error:
        what = f"cannot read the prompts of '{path}'."
        raise FileError(what, where=str(error), fix="a text file in UTF-8 with one prompt per line") from None
    return prompts
