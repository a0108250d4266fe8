"""Formats the error that ends a command, and returns its exit code."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from spanax.errors import INTERNAL, MISTAKE, SpanaxError
from spanax.frames import user_frames
from spanax.printable import printable_lines

MAX_FRAMES = 12

INTERNAL_NOTE = (
    "spanax: your own code did not raise this. Unless the message explains it, report the traceback as a bug."
)


def print_error(error: Exception, *, full: bool) -> int:
    """Prints an error on standard error, and returns the exit code."""
    text, code = explained(error, full=full)
    print(text, file=sys.stderr, flush=True)
    return code


def explained(error: BaseException, *, full: bool = False) -> tuple[str, int]:
    """Returns the text and the exit code for an error that ends a command.

    An error raised by user code is one line and the frames of the user's files. An internal error shows its traceback.

    Args:
      error: the error.
      full: whether to show the traceback of every error.

    Example:
      >>> explained(SpanaxError("unknown layout 'fdsp'."))
      ("spanax: unknown layout 'fdsp'. [SPX100]", 2)
    """
    frames = user_frames(error)
    if isinstance(error, SpanaxError):
        return (_traceback(error) if full else f"spanax: {error}"), error.exit_code
    if not frames:
        return f"{_traceback(error)}\n{INTERNAL_NOTE}", INTERNAL
    if full:
        return _traceback(error), MISTAKE
    message, *more = [line for line in str(error).splitlines() if line.strip()] or [""]
    first = f"{type(error).__name__}: {message}" if message else type(error).__name__
    hidden = "the full message and all frames" if more else "all frames"
    return printable_lines(f"spanax: {first}\n{_frames_text(frames)}  --traceback shows {hidden}"), MISTAKE


def _traceback(error: BaseException) -> str:
    return printable_lines("".join(traceback.format_exception(error)).rstrip())


def _frames_text(frames: Sequence[traceback.FrameSummary]) -> str:
    """Returns the location and the source of each frame, outermost first; a recursion repeats the same ones."""
    omitted = max(0, len(frames) - MAX_FRAMES)
    rows = [(_short(frame.filename), frame.lineno or 0, frame.name, frame.line) for frame in frames]
    if omitted:
        rows = [*rows[: MAX_FRAMES // 2], *rows[-MAX_FRAMES // 2 :]]
    return "".join(traceback.format_list(rows)) + (f"  ({omitted} frames omitted)\n" if omitted else "")


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
