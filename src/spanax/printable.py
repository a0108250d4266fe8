"""Printable: text of files and errors, which may be anybody's, as a terminal can show it without obeying it.

Control characters, line breaks where one line is expected, and what reorders or hides letters are written as escapes.
"""

import sys
import unicodedata

_JOINERS = "\u200c\u200d"
"""Format characters that words and emoji are spelled with."""

_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's categories of controls, format characters such as bidi overrides, surrogates, and separators of lines."""


def printable(value: object, most: int | None = None) -> str:
    """A value as one line of text without characters that steer a terminal, at most `most` letters of it.

    Example:
      >>> printable("a\\nb\\x1b[2J"), printable("\\u202egpj.exe"), printable(2 / 3)
      ('a\\\\nb\\\\x1b[2J', '\\\\u202egpj.exe', '0.666667')
    """
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write very long ones
        text = f"an integer of {value.bit_length()} bits"
    else:
        text = str(value)
    return _escaped(text if most is None else text[:most])[:most]


def printable_lines(text: str) -> str:
    """A text of several lines, each as `printable` shows it.

    Example:
      >>> printable_lines("step 1\\nstep 2\\r")
      'step 1\\nstep 2\\\\r'
    """
    return "\n".join(map(_escaped, text.split("\n")))


def is_printable(text: str) -> bool:
    """Whether `printable` shows a text as it is.

    Example:
      >>> is_printable("caf\\u00e9 \\U0001f40d"), is_printable("two\\nlines")
      (True, False)
    """
    return text.isprintable() or not any(map(_steers, text))


def to_stderr(line: object) -> None:
    """Print one line on standard error, after the name of the program."""
    print(f"spanax: {printable(line)}", file=sys.stderr, flush=True)


def to_stdout(text: str) -> None:
    """Write a document on standard output: byte for byte to a pipe or a file, as `printable_lines` on a terminal."""
    print(printable_lines(text) if sys.stdout.isatty() else text, end="", flush=True)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(letter.encode("unicode_escape").decode() if _steers(letter) else letter for letter in text)


def _steers(letter: str) -> bool:
    return unicodedata.category(letter) in _STEERING and letter not in _JOINERS
