"""Serve: one peer as a process that takes a step when it is told to, so that peers can take theirs in turn.

Told `step` on standard input it takes one and answers with a line of JSON, told `work` it counts what a step computes;
the end of the input is its end. The first line it says, once its first step is done, is what it is: parameters, tokens,
the loss, and what its start took.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shape import Shape

BEGAN = float(os.environ.get("PEER_BEGAN") or time.time())
"""When the command was given, by whoever gave it."""


def serve(shape: Shape, step: Callable[[np.ndarray], float], work: Callable[[], float], **facts: Any) -> None:
    """Take steps as they are asked for.

    Args:
      shape: what is trained.
      step: takes tokens (B, T + 1), trains on them, waits for the end and returns the loss.
      work: counts the floating point operations of a step, on all devices.
      facts: what the peer says of itself: `parameters`, `devices`, `versions`, and what it measured.
    """
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    batches = shape.batches()

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer | {"peak_bytes": peak_bytes()}), file=answers, flush=True)

    began = time.perf_counter()
    loss = step(next(batches))
    first_seconds = time.perf_counter() - began
    start = {"first_step_seconds": first_seconds, "to_first_step_seconds": time.time() - BEGAN}
    say({"loss": loss, "tokens": shape.num_tokens, **start, **facts})
    for line in sys.stdin:
        if line.strip() == "work":
            say({"flops": work()})
            continue
        tokens_BT = next(batches)
        began = time.perf_counter()
        loss = step(tokens_BT)
        say({"loss": loss, "seconds": time.perf_counter() - began})


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
