"""Tracebacks without the frames of Spanax, as JAX removes its own from those of `jax.jit`."""

from collections.abc import Iterator
from types import TracebackType

import jax

from spanax.errors import SpanaxError
from spanax.frames import is_library, is_spanax

NOTE = (
    "For simplicity, Spanax has removed its internal frames from the traceback. "
    "Set JAX_TRACEBACK_FILTERING=off to include these."
)


class WithoutSpanax:
    """A context that removes Spanax's frames from the tracebacks of errors; the frames of user code stay.

    JAX_TRACEBACK_FILTERING=off keeps every frame, as in JAX.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or jax.config.jax_traceback_filtering == "off":
            return
        for each in _chain(error):
            each.__traceback__ = _filtered(each.__traceback__)
        # A SpanaxError states what to change; JAX adds a note of its own to errors that occur while it traces.
        notes = getattr(error, "__notes__", ())
        if not isinstance(error, SpanaxError) and not any("JAX_TRACEBACK_FILTERING" in note for note in notes):
            error.add_note(NOTE)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its visible causes, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _filtered(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of Spanax and of the libraries that it calls."""
    frames = list[TracebackType]()
    is_inside = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_inside = is_spanax(file) or (is_inside and is_library(file))
        if not is_inside:
            frames.append(trace)
        trace = trace.tb_next
    result: TracebackType | None = None
    for frame in reversed(frames):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result
