"""Rules on a profile: what the devices waited for while they were watched."""

from collections.abc import Iterator

from spanax.check.lint.message import Message
from spanax.check.measure.profile import StepProfile

HOST_SHARE = 0.20
"""The share of a step in which a device may run nothing and wait for no batch. `gpt-nano`, simulated devices: 0.09."""

INPUT_SHARE = 0.05
"""The share of a step that may be waiting for a batch: batches are read ahead, so it is nothing where data is fast."""


def host_bound(found: StepProfile) -> Iterator[Message]:
    """Devices run nothing for a fifth of a profiled step, and no batch is waited for: the host is slower than they."""
    waited = found.host + found.idle
    if waited > HOST_SHARE * found.step_seconds:
        yield Message(
            "",
            f"{_share(waited, found)} of a step of {found.step_seconds:.3g} s no operation runs: host "
            f"{found.host:.3g} s, one device while another works {found.idle:.3g} s.",
            "a larger --batch, equal layers in one scan, and no --save-every or --eval-every in the traced steps",
        )


def input_bound(found: StepProfile) -> Iterator[Message]:
    """A profiled step waits for its batch for a twentieth of its time or more."""
    if found.input_wait > INPUT_SHARE * found.step_seconds:
        yield Message(
            "",
            f"{_share(found.input_wait, found)} of a step of {found.step_seconds:.3g} s is waiting for a batch: "
            f"{found.input_wait:.3g} s.",
            "a source that reads in parallel (grain: mp_prefetch), text encoded once (--data tokens.bin), or "
            "spanax.batches(..., prefetch=8) where batches come unevenly",
        )


def _share(seconds: float, found: StepProfile) -> str:
    return f"{100 * seconds / found.step_seconds:.0f} %"
