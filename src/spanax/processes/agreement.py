"""Compares a text of all processes through JAX's coordinator, without a collective on the devices."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from spanax.errors import HostsError, first_line
from spanax.processes.lockstep import operation

AGREEMENT_SECONDS = 600
"""How long a process waits for the texts of the others: the first one may be evaluating or saving by itself."""

_NUMBERS = count()


def verdict(text: str, judge: Callable[[Sequence[str]], str]) -> str:
    """Returns what `judge` says about the texts of all processes, in their order; the same on every process.

    The first process reads all texts and writes the verdict, so that the traffic grows with the number of processes
    only. Every process calls this equally often.

    Raises:
      HostsError: a process did not send its text in time.

    Example:
      >>> verdict("a batch of 8", lambda texts: f"{len(texts)} processes")
      '1 processes'
    """
    from jax._src import distributed  # multihost_utils.process_allgather would run between two steps of the user

    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return judge([text])
    topic = f"spanax:agreement {next(_NUMBERS)}"
    state.client.key_value_set(f"{topic}/{state.process_id}", text)
    with operation("the comparison of a batch"):
        return _exchanged(state, topic, text, judge)


def _exchanged(state: Any, topic: str, text: str, judge: Callable[[Sequence[str]], str]) -> str:
    timeout_ms = AGREEMENT_SECONDS * 1000
    try:
        if state.process_id == 0:
            ranks = range(state.num_processes)
            texts = [state.client.blocking_key_value_get(f"{topic}/{rank}", timeout_ms) for rank in ranks]
            # The service has no empty values.
            state.client.key_value_set(f"{topic}/verdict", f"={judge(texts)}")
        return str(state.client.blocking_key_value_get(f"{topic}/verdict", timeout_ms))[1:]
    except RuntimeError as error:
        raise HostsError(
            f"the other processes did not compare their batches with this one within {AGREEMENT_SECONDS} s.",
            where=f"process {state.process_id}: {text[:200]}; {first_line(error)}",
            fix="call the same functions equally often, with batches of the same shapes, on every process",
        ) from None
