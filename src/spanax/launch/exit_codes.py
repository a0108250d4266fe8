"""Interprets the exit codes of the processes of a run."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.names import LOGS, RANK_LOG
from spanax.errors import INTERNAL, MISTAKE, PREEMPTED

FINAL = {
    2: "invalid request",
    65: "invalid data",
    73: "its folder is not writable",
    78: "its configuration differs",
}
"""Exit codes for which a restart fails the same way."""

SIGNALLED = 128
"""Added to the number of a signal for the exit code, as shells do."""

KNOWN = FINAL | {MISTAKE: "an error in the user's code"}
"""Exit codes of a run that the supervisor passes on; any other becomes an internal error."""

ATTEMPT = "== attempt"
"""Prefix of the line that starts an attempt in a log."""

MAX_WORDS_LINES = 8
MAX_LOG_BYTES = 1 << 16


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
      code: the exit code, if this is the last attempt.
      what: a sentence, or `done`.
      rank: the rank that determined it.
      step: the largest step of any process.
      is_killed: whether SIGKILL ended it.
      has_step: whether the step is known; a program without heartbeats has none.
      words: the last lines of its log, if it ended with an exit code.
    """

    code: int
    what: str
    rank: int = 0
    step: int = 0
    is_killed: bool = False
    has_step: bool = True
    words: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the next attempt would end the same way."""
        return self.code in FINAL


def ending_of(codes: Sequence[int | None], *, is_program: bool = False) -> Ending:
    """Returns the ending for the exit codes of an attempt: None for a running process, negative for a signal.

    The code of a program is passed on, a signal as 128 plus its number. If one process dies, the others abort. An error
    of its own therefore takes precedence over a signal, and any other signal over SIGABRT. In the other processes of a
    program, a collective raises, so that a signal takes precedence over an exit code.

    Example:
      >>> ending_of([-6, 65]).what, ending_of([-6, -9]).what
      ('rank 1 exited with code 65: invalid data.', 'rank 1 was killed by SIGKILL.')
    """

    def priority(code: int) -> int:
        if code in FINAL:
            return 0
        if code > 0:
            return 2 if is_program else 1
        if code == -signal.SIGABRT:
            return 3
        return 1 if is_program else 2

    failed = [(priority(code), rank, code) for rank, code in enumerate(codes) if code not in (None, 0, PREEMPTED)]
    if not failed:
        return Ending(PREEMPTED, "stopped on request.")
    _, rank, code = min(failed)
    if code < 0:
        passed = SIGNALLED - code if is_program else INTERNAL
        what = f"rank {rank} was killed by {signal.Signals(-code).name}."
        return Ending(passed, what, rank, is_killed=code == -signal.SIGKILL)
    known = FINAL if is_program else KNOWN
    reason = f": {known[code]}" if code in known else ""
    passed = code if is_program or code in KNOWN else INTERNAL
    return Ending(passed, f"rank {rank} exited with code {code}{reason}.", rank)


def begin_log(folder: Path, rank: int, attempt: str) -> None:
    """Writes the line that starts an attempt into the log of a process."""
    place = Folder.of(folder).make()
    place.make(LOGS)
    with place.appending(RANK_LOG.of(rank)) as log:
        os.write(log, f"{ATTEMPT} {attempt}\n".encode())


def last_words(folder: Path, rank: int) -> str:
    """Returns the last lines that a process logged in its last attempt."""
    try:
        with Folder.of(folder).reading(RANK_LOG.of(rank)) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
            lines = file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    attempts = [number for number, line in enumerate(lines) if line.startswith(ATTEMPT)]
    lines = lines[attempts[-1] + 1 :] if attempts else lines
    logged = [line for line in lines if line.strip() and not line.startswith("[Gloo]")]
    return "\n".join(logged[-MAX_WORDS_LINES:])
