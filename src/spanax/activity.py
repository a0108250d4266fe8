"""What a long computation does at the moment, for a command that shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Show = Callable[[str], None]

_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)


def doing(text: str) -> None:
    """Reports what is done from now on; nobody may listen.

    Example:
      >>> with told_to(print):
      ...     doing("tracing the step")
      tracing the step
    """
    show = _SHOW.get()
    if show is not None:
        show(text)


@contextmanager
def told_to(show: Show) -> Iterator[None]:
    """Calls a function with each text that is passed to `doing` in this context."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)
