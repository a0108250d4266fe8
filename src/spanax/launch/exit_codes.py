"""Ending: how the processes of a run ended, and what their exit codes ask for."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.names import RANK_LOG
from spanax.errors import INTERNAL, MISTAKE, PREEMPTED

FINAL = {
    2: "its request cannot be carried out",
    65: "its data is bad",
    73: "its folder cannot be written",
    78: "its configuration is another",
}
"""Exit codes that a restart does not change."""

KNOWN = FINAL | {MISTAKE: "its own code raised"}
"""Exit codes that an attempt ends with as its processes do; any other is an internal error."""

ATTEMPT = "== attempt"
"""What the part of an attempt in a log begins with."""

MAX_WORDS_LINES, MAX_LOG_BYTES = 8, 1 << 16


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
      code: what to exit with, if this is the last one.
      what: a sentence, or `done`.
      rank: whose end it was.
      step: how far any process had come.
      is_killed: whether SIGKILL ended it.
    """

    code: int
    what: str
    rank: int = 0
    step: int = 0
    is_killed: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the next attempt would end in the same way."""
        return self.code in FINAL

    def at(self, step: int) -> "Ending":
        """The same, at a step."""
        return replace(self, step=step)


def ending_of(codes: Sequence[int | None]) -> Ending:
    """What the exit codes of an attempt say, None for a process that still runs; a signal is a negative number.

    When one dies the others abort: so an error of its own tells more than a signal, and any other signal more than
    that abort.

    Example:
      >>> ending_of([-6, 65]).what, ending_of([-6, -9]).what
      ('rank 1 ended with 65: its data is bad.', 'rank 1 was killed by SIGKILL.')
    """

    def weight(code: int) -> int:
        return 0 if code in FINAL else 1 if code > 0 and code != PREEMPTED else 3 if code == -signal.SIGABRT else 2

    failed = [(weight(code), rank, code) for rank, code in enumerate(codes) if code not in (None, 0, PREEMPTED)]
    if not failed:
        return Ending(PREEMPTED, "stopped where it was asked to.")
    _, rank, code = min(failed)
    if code < 0:
        return Ending(
            70, f"rank {rank} was killed by {signal.Signals(-code).name}.", rank, is_killed=code == -signal.SIGKILL
        )
    reason = f": {KNOWN[code]}" if code in KNOWN else ""
    return Ending(code if code in KNOWN else INTERNAL, f"rank {rank} ended with {code}{reason}.", rank)


def last_words(folder: Path, rank: int) -> str:
    """The last lines that a process wrote into its log in its last attempt."""
    try:
        with Folder.of(folder).reading(RANK_LOG.of(rank)) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
            lines = file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    begins = [at for at, line in enumerate(lines) if line.startswith(ATTEMPT)]
    lines = lines[begins[-1] + 1 :] if begins else lines
    told = [line for line in lines if line.strip() and not line.startswith("[Gloo]")]
    return "\n".join(told[-MAX_WORDS_LINES:])
