"""Turns of threads: functions of the same objects run one after the other."""

import threading
from typing import Any

from spanax.compat import is_of_python
from spanax.errors import ObjectsError


class Turns:
    """A lock that one thread at a time has, and may take again, as when one function is called while another is traced.

    A callback of a running program gets an error instead of the lock: its program waits for it, and so may the devices.

    Example:
      >>> turns = Turns()
      >>> with turns, turns:
      ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        # XLA runs callbacks in threads of its own.
        if not self._lock.acquire(blocking=is_of_python()):
            raise ObjectsError(
                "a callback of a running function calls a function of spanax.jit on the same devices.",
                fix="return its arguments from the running function, and call it afterwards",
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Turns":
        return Turns()
