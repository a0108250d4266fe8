"""TOML and JSON texts with a checksum (seal) in front, which detects truncated and modified texts.

A sealed text is still valid TOML or JSON. Texts from earlier versions and handwritten texts have no seal.
"""

import re
import zlib
from dataclasses import dataclass

FORMAT = 1
"""The version of the seal, at the start of a sealed text, so that a truncated text still shows its seal."""

_TOML = re.compile(r'format = (\d+)\ncrc32 = "([0-9a-f]{8})"\n')
_JSON = re.compile(r'\{\n "format": (\d+),\n "crc32": "([0-9a-f]{8})",\n')
_REMNANT = re.compile(r'\b(format|crc32)"? ?[=:]')
_HEAD_LENGTH = 48
"""The length of the prefix to search for a damaged seal: no single change hides both of its keys."""


class DamagedError(ValueError):
    """A sealed text was truncated, damaged or edited."""


@dataclass(frozen=True)
class Opened:
    """A text without its seal, and whether it was sealed."""

    text: str
    is_sealed: bool


def sealed(text: str) -> str:
    """Prepends a seal to a text: two keys of a TOML document, or the first two keys of an indented JSON object.

    Example:
      >>> print(sealed("steps = 7\\n"), end="")
      format = 1
      crc32 = "2171c51d"
      steps = 7
    """
    crc = checksum(text)
    if text.startswith("{\n"):
        return f'{{\n "format": {FORMAT},\n "crc32": "{crc}",\n{text[2:]}'
    return f'format = {FORMAT}\ncrc32 = "{crc}"\n{text}'


def opened(text: str) -> Opened:
    """Verifies and removes the seal of a text; a text without a seal is unchanged.

    Raises:
      DamagedError: the text does not match its seal, or the format of the seal is unknown to this version.

    Example:
      >>> opened(sealed("steps = 7\\n"))
      Opened(text='steps = 7\\n', is_sealed=True)
      >>> opened(sealed("steps = 7\\n")[:-2])
      Traceback (most recent call last):
      spanax.sealed.DamagedError: it does not match its checksum: it was truncated, damaged or edited
    """
    match = _TOML.match(text) or _JSON.match(text)
    if match is None:
        if _REMNANT.search(text[:_HEAD_LENGTH]):
            raise DamagedError("its checksum cannot be read: it was truncated, damaged or edited")
        return Opened(text, is_sealed=False)
    if int(match[1]) != FORMAT:
        raise DamagedError(f"it has format {match[1]}, but this version reads format {FORMAT}")
    content = ("{\n" if text.startswith("{") else "") + text[match.end() :]
    if checksum(content) != match[2]:
        raise DamagedError("it does not match its checksum: it was truncated, damaged or edited")
    return Opened(content, is_sealed=True)


def checksum(text: str) -> str:
    """Returns the CRC-32 of a text, as eight hexadecimal digits.

    Example:
      >>> checksum("steps = 7\\n")
      '2171c51d'
    """
    return f"{zlib.crc32(text.encode()):08x}"
