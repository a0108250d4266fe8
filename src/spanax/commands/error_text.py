"""Mistakes: what the command line prints for an error, and the exit code."""

import itertools
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from spanax.errors import INTERNAL, MISTAKE, SpanaxError
from spanax.frames import user_frames
from spanax.printable import printable_lines

MAX_FRAMES = 12

NOT_YOURS = "spanax: your own code did not raise this. Unless the message explains it, report the traceback as a bug."


def explained(error: BaseException, *, full: bool = False) -> tuple[str, int]:
    """The text and the exit code for an error that ends a command.

    An error that the user's code raised is one line and the user's frames. An internal error shows its traceback.

    Args:
      error: the error.
      full: whether to show the traceback of every error.

    Example:
      >>> explained(SpanaxError("unknown layout 'fdsp'."))
      ("spanax: unknown layout 'fdsp'.", 2)
    """
    frames = user_frames(error)
    if isinstance(error, SpanaxError):
        return (_traceback(error) if full else f"spanax: {error}"), error.exit_code
    if not frames:
        return f"{_traceback(error)}\n{NOT_YOURS}", INTERNAL
    if full:
        return _traceback(error), MISTAKE
    message, *rest = [line for line in str(error).splitlines() if line.strip()] or [""]
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    hidden = "the full message and all frames" if rest else "all frames"
    return printable_lines("\n".join([f"spanax: {what}", *_lines(frames), f"  --traceback shows {hidden}"])), MISTAKE


def _traceback(error: BaseException) -> str:
    return printable_lines("".join(traceback.format_exception(error)).rstrip())


def _lines(frames: Sequence[traceback.FrameSummary]) -> Iterator[str]:
    """Two lines per frame, outermost first: the place and its source."""
    # A function that calls itself has the same frame many times.
    calls = [next(same) for _, same in itertools.groupby(frames, lambda frame: (frame.filename, frame.lineno))]
    first, last = calls[: MAX_FRAMES // 2], calls[MAX_FRAMES // 2 :][-MAX_FRAMES // 2 :]
    yield from itertools.chain.from_iterable(map(_shown, first))
    if omitted := len(frames) - len(first) - len(last):
        yield f"  ({omitted} frames omitted)"
    yield from itertools.chain.from_iterable(map(_shown, last))


def _shown(frame: traceback.FrameSummary) -> Iterator[str]:
    path = Path(frame.filename)
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    # The body of a file is not a function.
    function = f", in {frame.name}" if frame.name.isidentifier() else ""
    yield f"  {short}:{frame.lineno}{function}"
    if frame.line:
        yield f"    {frame.line}"
