"""Escaping of untrusted text from files and errors for display on a terminal.

Control characters, line breaks within a line, and characters that reorder or hide others are escaped.
"""

import sys
import unicodedata

_JOINERS = "\u200c\u200d"
"""Format characters in words and emoji, which are not escaped."""

_CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of control characters, format characters (bidi overrides), surrogates and line separators."""


def printable(value: object, most: int | None = None) -> str:
    """Formats a value as one line of text without control characters, truncated to `most` characters.

    Example:
      >>> printable("a\\nb\\x1b[2J"), printable("\\u202egpj.exe"), printable(2 / 3)
      ('a\\\\nb\\\\x1b[2J', '\\\\u202egpj.exe', '0.666667')
    """
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, int) and value.bit_length() > 256:  # Python does not format very large integers
        text = f"an integer of {value.bit_length()} bits"
    else:
        text = str(value)
    return _escaped(text if most is None else text[:most])[:most]


def printable_lines(text: str) -> str:
    """Escapes each line of a text as `printable` does.

    Example:
      >>> printable_lines("step 1\\nstep 2\\r")
      'step 1\\nstep 2\\\\r'
    """
    return "\n".join(map(_escaped, text.split("\n")))


def is_printable(text: str) -> bool:
    """Returns whether `printable` leaves a text unchanged.

    Example:
      >>> is_printable("caf\\u00e9 \\U0001f40d"), is_printable("two\\nlines")
      (True, False)
    """
    return text.isprintable() or not any(map(_is_control, text))


def to_stderr(line: object) -> None:
    """Prints one line on standard error, prefixed with the name of the program."""
    print(f"spanax: {printable(line)}", file=sys.stderr, flush=True)


def to_stdout(text: str) -> None:
    """Writes a document to standard output: unchanged to a pipe or file, escaped by `printable_lines` on a terminal."""
    print(printable_lines(text) if sys.stdout.isatty() else text, end="", flush=True)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(letter.encode("unicode_escape").decode() if _is_control(letter) else letter for letter in text)


def _is_control(letter: str) -> bool:
    return unicodedata.category(letter) in _CONTROL and letter not in _JOINERS
