"""Lint rules on cost, predicted or profiled: faster alternatives, memory limits, devices that wait for the host."""

from collections.abc import Iterator

from spanax.check.lint.subject import LintSubject, Message
from spanax.check.profile import StepProfile
from spanax.plan.candidate import Candidate
from spanax.units import bytes_text

RESERVE = 0.05
"""Fraction of the memory that a compiled step leaves free, for fragmentation."""

MIN_SPEEDUP = 1.05
"""An alternative is reported from this speedup: the median error of predicted step times is as large."""


def data_parallel_faster(subject: LintSubject) -> Iterator[Message]:
    """The training state fits on one device, and data parallelism is faster."""
    axes = {axis for axis, size in subject.plan.mesh.axes if size > 1}
    if axes == {"data"} and not subject.plan.layout.stored_params:
        return
    yield from _faster(subject, [entry for entry in subject.alternatives if entry.layout == "data"])


def hsdp_faster(subject: LintSubject) -> Iterator[Message]:
    """Parameters are all-gathered across nodes, although one sharded copy per node fits and is faster."""
    stored = subject.plan.layout.stored_params
    if not stored or not any(subject.spans_nodes(axis) for axis in stored if axis in subject.plan.mesh.names):
        return
    node_size = subject.cluster.devices_per_node
    candidates = [entry for entry in subject.alternatives if entry.storing == "fsdp" and entry.mesh.ways(["data"]) > 1]
    candidates = [entry for entry in candidates if entry.microbatches == subject.candidate.microbatches]
    yield from _faster(subject, [entry for entry in candidates if 1 < entry.mesh.ways(["fsdp"]) <= node_size])


def pipeline_not_needed(subject: LintSubject) -> Iterator[Message]:
    """The layers are partitioned into pipeline stages, but the same devices are faster without a pipeline."""
    if subject.plan.schedule.num_stages > 1:
        yield from _faster(subject, list(subject.alternatives))


def insufficient_memory(subject: LintSubject) -> Iterator[Message]:
    """The step exceeds the memory of a device, or leaves too little for compiler temporaries and fragmentation."""
    limit = subject.cluster.memory_bytes
    if limit is None:
        return
    compiled = subject.report.compiled.peak_bytes if subject.report is not None else None
    peak, source = (compiled, "the compiler") if compiled else (subject.candidate.peak_bytes, "the plan")
    reserve = RESERVE if compiled else 1 - peak / max(subject.candidate.upper_bytes, 1)
    if peak <= limit * (1 - reserve):
        return
    verdict = "does not fit" if peak > limit else f"leaves less than {100 * reserve:.0f} % free"
    best = next(iter(subject.alternatives), None)
    fix = f"{best.title} needs {bytes_text(best.peak_bytes)}" if best is not None else "more devices"
    yield Message(
        "",
        f"the step needs {bytes_text(peak)} of {bytes_text(limit)} per device (according to {source}): it {verdict}.",
        fix,
        int(peak),
        peak > limit,
    )


def optimizer_memory(subject: LintSubject) -> Iterator[Message]:
    """The parameters fit on a device, but the parameters with the optimizer state do not."""
    limit = subject.cluster.memory_bytes
    params = subject.plan.state_bytes("param")
    state = subject.plan.state_bytes()
    if limit is not None and params <= limit / 2 and state > limit and state > 2 * params:
        yield Message(
            "",
            f"the parameters take {bytes_text(params)} per device, but {bytes_text(state)} with the optimizer "
            f"state; the limit is {bytes_text(limit)}.",
            "a sharded optimizer state (zero1), or a smaller optimizer",
            state,
        )


def _faster(subject: LintSubject, candidates: list[Candidate]) -> Iterator[Message]:
    current = subject.searched_candidate
    best = min(candidates, key=lambda candidate: candidate.step_seconds, default=None)
    if best is not None and current.step_seconds > MIN_SPEEDUP * best.step_seconds:
        percent = 100 * (current.step_seconds / best.step_seconds - 1)
        yield Message(
            "",
            f"{current.title} takes {current.step_seconds:.3g} s per step, {percent:.0f} % longer than {best.layout}.",
            f"{best.title}: {best.step_seconds:.3g} s, {bytes_text(best.peak_bytes)} per device",
        )


MAX_HOST_SHARE = 0.20
"""The largest share of a step that devices may be idle for other reasons than input. `gpt-nano` on simulated devices
measures 0.09."""

MAX_INPUT_SHARE = 0.05
"""The largest share of a step that may be spent waiting for a batch. Batches are prefetched, so a fast input pipeline
measures about 0."""


def host_bound(profile: StepProfile) -> Iterator[Message]:
    """Devices are idle for more than 20 % of a profiled step while no batch is loading: the host is the bottleneck."""
    host, idle_alone = (profile.seconds[part] for part in ("host", "idle"))
    idle = host + idle_alone
    if idle > MAX_HOST_SHARE * profile.step_seconds:
        yield Message(
            "",
            f"devices are idle for {_share(idle, profile)} of a step of {profile.step_seconds:.3g} s: "
            f"{host:.3g} s for the host, {idle_alone:.3g} s while another device works.",
            "a larger --global-batch-size, equal layers in one scan, and no --save-every or --eval-every then",
        )


def input_bound(profile: StepProfile) -> Iterator[Message]:
    """A profiled step waits for its batch for more than 5 % of its time."""
    wait = profile.seconds["input wait"]
    if wait > MAX_INPUT_SHARE * profile.step_seconds:
        yield Message(
            "",
            f"{_share(wait, profile)} of a step of {profile.step_seconds:.3g} s is spent waiting for a "
            f"batch: {wait:.3g} s.",
            "a data source that reads in parallel (grain: mp_prefetch), text tokenized in advance (--data tokens.bin), "
            "or spanax.batches(..., prefetch=8) if batches arrive unevenly",
        )


def _share(seconds: float, profile: StepProfile) -> str:
    return f"{100 * seconds / profile.step_seconds:.0f} %"
