"""What a command does is shown while it runs, and not where its answer is printed."""

import io
import time

from spanax.displays import doing
from spanax.show.live.waiting import waiting


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_a_line_each_interval() -> None:
    stream = io.StringIO()
    with waiting(stream, interval_seconds=0.05):
        doing("tracing the step")
        time.sleep(0.2)
        doing("pricing")
        time.sleep(0.2)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "0 s: tracing the step" and lines[-1] == "0 s: pricing" and len(lines) >= 3
    doing("nothing listens")
    assert stream.getvalue().splitlines() == lines


def test_a_short_command_prints_nothing_in_a_pipe() -> None:
    stream = io.StringIO()
    with waiting(stream):
        doing("tracing the step")
    assert stream.getvalue() == ""


def test_a_terminal_shows_a_line_at_once() -> None:
    stream = Screen()
    with waiting(stream):
        time.sleep(0.6)
        doing("tracing the step")
        time.sleep(0.6)
    assert "0 s: starting" in stream.getvalue() and "tracing the step" in stream.getvalue()
