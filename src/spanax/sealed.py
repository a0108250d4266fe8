"""TOML and JSON texts with a checksum (seal) in front, which detects truncated and modified texts.

A sealed text is still valid TOML or JSON. Handwritten texts have no seal.
"""

import hashlib
import re
import zlib
from typing import Any

FORMAT = 1
"""The version of the seal, at the start of a sealed text, so that a truncated text still shows its seal."""

_TOML = re.compile(r'format = (\d+)\ncrc32 = "([0-9a-f]{8})"\n')
_JSON = re.compile(r'\{\n "format": (\d+),\n "crc32": "([0-9a-f]{8})",\n')


class DamagedError(ValueError):
    """A sealed text was truncated, damaged or edited."""


class VersionError(ValueError):
    """A file was written by another version of Spanax."""

    fix = "read it with the version of Spanax that wrote it, or write it again"


def check_version(version: object, expected: int) -> None:
    """Raises VersionError if a file has another version than `expected`, the one that this Spanax reads."""
    if version != expected:
        raise VersionError(f"it has version {str(version)[:40]}; this Spanax reads version {expected}")


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


def opened(text: str, *, is_record: bool = False) -> str:
    """Verifies and removes the seal of a text; a text without a seal is unchanged.

    Args:
      text: the text.
      is_record: whether it has to be sealed.

    Raises:
      DamagedError: the text does not match its seal, or has none although it has to.
      VersionError: the seal has another version.

    Example:
      >>> opened(sealed("steps = 7\\n"))
      'steps = 7\\n'
      >>> opened(sealed("steps = 7\\n")[:-2])
      Traceback (most recent call last):
      spanax.sealed.DamagedError: it does not match its checksum: it was truncated, damaged or edited
    """
    match = _TOML.match(text) or _JSON.match(text)
    if match is None:
        if is_record:
            raise DamagedError("its checksum cannot be read: it was truncated, damaged or edited")
        return text
    check_version(int(match[1]), FORMAT)
    content = ("{\n" if text.startswith("{") else "") + text[match.end() :]
    if checksum(content) != match[2]:
        raise DamagedError("it does not match its checksum: it was truncated, damaged or edited")
    return content


def checksum(text: str) -> str:
    """Returns the CRC-32 of a text, as eight hexadecimal digits.

    Example:
      >>> checksum("steps = 7\\n")
      '2171c51d'
    """
    return f"{zlib.crc32(text.encode()):08x}"


def digest(*parts: Any) -> str:
    """Returns a hash of texts, bytes and arrays as twelve hex digits, equal on every machine.

    Example:
      >>> digest("a", "bc") == digest("ab", "c")
      False
    """
    state = hashlib.blake2b(digest_size=6)
    for part in parts:
        text = part.encode() if isinstance(part, str) else part
        data = text if isinstance(text, bytes) else text.tobytes()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
