"""Ends a group of processes that wait for each other in different operations, such as a step that one has not taken.

All processes enter the same operations in the same order: steps, comparisons of batches, saves. If one leaves an
operation out, the others wait in a collective, which nothing in Python can interrupt. Therefore each process has a
thread that compares its place with those of the others while it is late, through JAX's coordinator. An operation that
takes its usual time costs no message.
"""

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from spanax.compat import coordination
from spanax.errors import HostsError, first_line

POLL_SECONDS = 1.0
LATE_SECONDS = 3.0
"""After this time in an operation, a process compares its place with those of the others."""

SHUTDOWN_SECONDS = 300
"""How long processes that have ended wait for the last of them, which may still export a model. JAX's default."""

LEAVING_SECONDS = 5.0
"""How long a process with an error waits for the others to print it too: the first has JAX's coordinator."""

PLACES = "spanax:places/"
LEAVING = "spanax:leaving/"
"""Keys of the coordinator, followed by a rank."""


@dataclass(frozen=True)
class Place:
    """The place of a process that is late, or has ended.

    Attributes:
      number: the number of operations that it has entered.
      name: the last of them.
      has_ended: whether it has ended, so that it enters no other.
      error: the error that it has ended with.
    """

    number: int
    name: str
    has_ended: bool = False
    error: str = ""


def conflict(places: Mapping[int, Place]) -> HostsError | None:
    """Returns the error of processes of which one waits in vain, given the places of those that are late or ended.

    Example:
      >>> print(conflict({0: Place(3, "`step`", has_ended=True), 1: Place(4, "`step`")}))
      process 0 has ended, and process 1 waits for it in `step`. [SPX604]
        fix: the same steps on every process: the same number of batches, in the same order, and of the same shapes
      >>> conflict({0: Place(4, "`step`"), 1: Place(4, "`step`")})
    """
    for rank, place in sorted(places.items()):
        for other, others in sorted(places.items()):
            is_elsewhere = others.number == place.number and others.name != place.name
            is_missing = others.has_ended and others.number < place.number + bool(others.error)
            if not place.has_ended and (is_missing or is_elsewhere):
                what = "has ended" if others.has_ended else f"is in {others.name}"
                return HostsError(
                    f"process {other} {what}, and process {rank} waits for it in {place.name}.",
                    where=others.error,
                    fix=""
                    if others.error
                    else "the same steps on every process: the same number of batches, "
                    "in the same order, and of the same shapes",
                )
    return None


@dataclass(eq=False)
class _Watch:
    """The place of this process, which other threads write, and the thread that compares it."""

    client: Any
    rank: int
    num_processes: int
    number: int = 0
    name: str = ""
    depth: int = 0
    since: float = 0.0
    result: Callable[[], Any] = lambda: None
    sent: Place | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(default_factory=threading.Thread)
    is_leaving: bool = False
    error: str = ""

    def is_late(self) -> bool:
        """Returns whether the last operation takes long, or the computation that it has dispatched."""
        if time.monotonic() - self.since < LATE_SECONDS:
            return False
        try:
            result = self.result()
            return self.depth > 0 or (result is not None and not result.is_ready())
        except RuntimeError:  # the array was donated to a later operation
            return False

    def compare(self) -> bool:
        """Publishes this place and ends the process if one waits in vain; returns whether all have ended."""
        place = Place(self.number, self.name, self.ended.is_set(), self.error)
        if place != self.sent:
            self.client.key_value_set(f"{PLACES}{self.rank}", json.dumps(asdict(place)), allow_overwrite=True)
            self.sent = place
        read = self.client.key_value_dir_get(PLACES)
        places = {int(key.rpartition("/")[2]): Place(**json.loads(text)) for key, text in read}
        if error := conflict(places):
            if self.error:
                return bool(self.client.key_value_dir_get(LEAVING))
            self.leave(error, sum(not each.error for each in places.values()))
        return sum(each.has_ended for each in places.values()) == self.num_processes

    def leave(self, error: HostsError, num_leaving: int) -> None:
        """Ends this process with an error, as soon as the others have printed it."""
        self.is_leaving = True
        print(f"spanax: {error}", file=sys.stderr, flush=True)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        deadline = time.monotonic() + LEAVING_SECONDS
        with suppress(RuntimeError):
            self.client.key_value_set(f"{LEAVING}{self.rank}", "1", allow_overwrite=True)
            while len(self.client.key_value_dir_get(LEAVING)) < num_leaving and time.monotonic() < deadline:
                time.sleep(0.05)
        if self.rank == 0:
            time.sleep(0.2)  # the others end first: without a coordinator, JAX would abort them
        os._exit(error.exit_code)

    def run(self) -> None:
        """Compares the places while this process is late, until it has ended."""
        with suppress(RuntimeError):  # the coordinator has ended, and JAX ends this process
            while not self.ended.wait(POLL_SECONDS):
                if self.is_late():
                    self.compare()

    def end(self, seconds: float = SHUTDOWN_SECONDS) -> None:
        """Waits until all processes have ended, so that one that waits for this one learns about it."""
        self.ended.set()
        self.thread.join()
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            while not self.compare() and time.monotonic() < deadline:
                time.sleep(0.1)

    def fail(self, error: str) -> None:
        """Tells the others about the error that ends this process, unless it is a consequence of another's end."""
        with suppress(RuntimeError):
            self.compare()
        self.error = error
        self.end(LEAVING_SECONDS if self.rank == 0 else 0.0)


_watches: list[_Watch] = []


def watch() -> _Watch | None:
    """Starts the thread of this process, once; returns None without a group."""
    if _watches:
        return _watches[0]
    state = coordination()
    if state.client is None or (state.num_processes or 1) == 1:
        return None
    started = _Watch(state.client, state.process_id, state.num_processes)
    _watches.append(started)
    started.thread = threading.Thread(target=started.run, daemon=True, name="spanax-lockstep")
    started.thread.start()
    atexit.register(started.end)  # runs before JAX's, which waits for the other processes
    return started


def fail(error: BaseException) -> None:
    """Tells the other processes that an error ends this one; does not return if the error is a consequence of theirs.

    Gloo, for example, reports that a connection was closed.
    """
    for started in _watches:
        if started.is_leaving:
            time.sleep(2 * LEAVING_SECONDS)
        started.fail(first_line(error)[:200])


@contextmanager
def operation(name: str) -> Iterator[None]:
    """Marks an operation that all processes of the group enter, in the same order."""
    started = watch()
    if started is None:
        yield
        return
    started.name = name
    started.number += 1
    started.depth += 1
    started.since = time.monotonic()
    try:
        yield
    finally:
        started.depth -= 1


def in_lockstep(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a compiled function whose calls are operations, until their results are computed."""
    started = watch()
    if started is None:
        return function
    import jax

    def call(*args: Any) -> Any:
        with operation(name):
            results = function(*args)
        last = results[-1] if results and isinstance(results, list | tuple) else results
        if leaves := jax.tree.leaves(last) or jax.tree.leaves(results):
            started.result = weakref.ref(leaves[-1])  # weak: the array may be large
        return results

    return call
