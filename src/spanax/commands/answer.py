"""The result of a command: text, JSON and an exit code."""

from dataclasses import dataclass
from typing import Any, TextIO

from spanax.documents import json_line
from spanax.printable import printable_lines


@dataclass(frozen=True)
class Answer:
    """What a command prints.

    Attributes:
      text: the text; empty to print nothing.
      data: the object that --json prints; a JSON document as text is printed unchanged.
      exit_code: 0 for success.
      is_styled: whether the text contains colors, and names in it are escaped already.
      stream: where to print, instead of standard output.
    """

    text: str = ""
    data: Any = None
    exit_code: int = 0
    is_styled: bool = False
    stream: TextIO | None = None

    def to_json(self) -> str:
        """Returns the data as JSON."""
        return self.data if isinstance(self.data, str) else json_line(self.data)

    def to_text(self) -> str:
        """Returns the text without characters that control a terminal."""
        return self.text if self.is_styled else printable_lines(self.text)
