"""Lint rules on a profile: devices that wait for the host or for input batches."""

from collections.abc import Iterator

from spanax.check.lint.subject import Message
from spanax.check.profile import StepProfile

MAX_HOST_SHARE = 0.20
"""The largest share of a step that devices may be idle for other reasons than input. `gpt-nano` on simulated devices
measures 0.09."""

MAX_INPUT_SHARE = 0.05
"""The largest share of a step that may be spent waiting for a batch. Batches are prefetched, so a fast input pipeline
measures about 0."""


def host_bound(profile: StepProfile) -> Iterator[Message]:
    """Devices are idle for more than 20 % of a profiled step while no batch is loading: the host is the bottleneck."""
    idle = profile.host + profile.idle
    if idle > MAX_HOST_SHARE * profile.step_seconds:
        yield Message(
            "",
            f"devices are idle for {_share(idle, profile)} of a step of {profile.step_seconds:.3g} s: "
            f"{profile.host:.3g} s for the host, {profile.idle:.3g} s while another device works.",
            "a larger --global-batch-size, equal layers in one scan, and no --save-every or --eval-every then",
        )


def input_bound(profile: StepProfile) -> Iterator[Message]:
    """A profiled step waits for its batch for more than 5 % of its time."""
    if profile.input_wait > MAX_INPUT_SHARE * profile.step_seconds:
        yield Message(
            "",
            f"{_share(profile.input_wait, profile)} of a step of {profile.step_seconds:.3g} s is spent waiting for a "
            f"batch: {profile.input_wait:.3g} s.",
            "a data source that reads in parallel (grain: mp_prefetch), text tokenized in advance (--data tokens.bin), "
            "or spanax.batches(..., prefetch=8) if batches arrive unevenly",
        )


def _share(seconds: float, profile: StepProfile) -> str:
    return f"{100 * seconds / profile.step_seconds:.0f} %"
