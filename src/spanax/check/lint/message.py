"""Said: what a rule says of one thing, before it is a finding."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """The array or axis, one line on it with its values, the nearest thing that works, and bytes of one device.

    `is_error` says that it is worse than its rule in general.
    """

    path: str
    message: str
    fix: str = ""
    num_bytes: int = 0
    is_error: bool = False
