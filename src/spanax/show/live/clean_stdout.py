"""Reserves standard output for a command, so that output of C++ libraries does not mix with JSON."""

import os
import sys
from typing import TextIO


def reserve_stdout() -> TextIO:
    """Returns a stream to standard output, and redirects file descriptor 1 to standard error.

    Libraries such as Gloo write to the descriptor at any time until the process ends.
    """
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream
