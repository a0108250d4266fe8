"""Solves for a size of a workload: the largest that fits, the fewest devices, the batch of an MFU."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spanax.commands.answer import Answer
from spanax.commands.plan.flags import PlanCommand, priced, request_of, traced
from spanax.errors import CapacityError, SpanaxError
from spanax.train.flags import Load

if TYPE_CHECKING:
    from spanax.hardware.cluster import Cluster
    from spanax.plan.candidate import Search
    from spanax.trace.program import Program

FIELDS = {"batch": "global_batch_size", "seq": "seq_len", "layers": "layers", "embed": "embed"}
"""By size that can be solved for: the field of its flag."""


def largest_size(command: PlanCommand, load: Load, machine: "Cluster", name: str) -> Answer:
    """Returns the largest size of that name that fits."""
    from spanax.errors import SizeError
    from spanax.plan.advice.what_if import largest
    from spanax.plan.choose import nothing_fits

    if name == "batch":
        return _largest_batch(command, load, machine)
    step = {"seq": 128, "layers": 1, "embed": 128}[name]
    default = {"seq": 512, "layers": 8, "embed": 1024}[name]
    start = getattr(command.sizes, FIELDS[name]) or default
    search_at = partial(_search_at, command, load, machine, name)

    def search_or_none(size: int) -> "Search | None":
        try:
            return search_at(size)[0]
        except SizeError:
            raise
        except SpanaxError:
            if size <= step:
                raise
            return None  # no layout divides it

    fitting = largest(search_or_none, start, step)
    if fitting is None:
        raise nothing_fits(f"not even {name} {step} fits on {machine}.", *search_at(step), request_of(command))
    return _sized(f"the largest {name} that fits on {machine} is about {fitting[0]}", *fitting, name, command)


def _largest_batch(command: PlanCommand, load: Load, machine: "Cluster") -> Answer:
    """Returns the largest batch that fits, with the layouts at that batch."""
    from spanax.plan.choose import largest_batch, nothing_fits

    program = traced(command, load)
    request = request_of(command)
    found = largest_batch(program, machine, request)
    if found is None:
        raise nothing_fits(f"no batch fits on {machine}.", *priced(command, load, machine, program), request)
    size = found.batch_size
    search, _ = _search_at(command, load, machine, "batch", size)
    return _sized(f"the largest batch that fits on {machine} is {size}", size, search, "batch", command)


def _search_at(command: PlanCommand, load: Load, machine: "Cluster", name: str, size: int) -> "tuple[Search, Program]":
    """Returns the search with one size replaced, and the program."""
    sizes: dict[str, Any] = {FIELDS[name]: size}
    return priced(replace(command, sizes=replace(command.sizes, **sizes)), load, machine)


def fewest(command: PlanCommand, load: Load, machine: "Cluster") -> Answer:
    """Returns the fewest devices on which the step fits."""
    from spanax.plan.advice.what_if import fewest_devices

    search = fewest_devices(lambda cluster: priced(command, load, cluster)[0], machine)
    if search is None:
        what = f"the step does not fit on 65536 {machine.chip.name} or fewer."
        raise CapacityError(what, fix="a smaller --global-batch-size, or --remat full")
    count = search.cluster.num_devices
    return _sized(f"the fewest {machine.chip.name} on which it fits are {count}", count, search, "devices", command)


def batch_of_mfu(command: PlanCommand, load: Load, machine: "Cluster") -> Answer:
    """Doubles the batch until the best layout reaches the requested MFU."""
    target = command.target_mfu or 0.0
    limit = 64 * machine.num_devices
    size = command.sizes.global_batch_size or machine.num_devices
    highest = 0.0
    while (best := (search := _search_at(command, load, machine, "batch", size)[0]).best) is not None:
        highest = max(highest, 100 * (search.rates(best).mfu or 0.0))
        if highest >= target:
            return _sized(f"{target:g} % MFU is reached from a batch of {size}", size, search, "batch", command)
        if size >= limit:
            break
        size *= 2
    what = f"{target:g} % MFU is not reached on {machine} with a batch of up to {size}."
    raise CapacityError(what, where=f"the most is {highest:.1f} %")


def _sized(text: str, size: int, search: "Search", name: str, command: PlanCommand) -> Answer:
    """Returns a size as the answer, with the search at that size."""
    from spanax.plan.advice.summary import summarize
    from spanax.show.search import search_json, search_text

    summary = summarize(search)
    data = {"answer": size, "of": name} | search_json(summary, command.top)
    if command.solve_for and command.request.offload is None and search.cluster.chip.host_bytes_per_second:
        text += "; --solve-for offloads on request only (--offload optimizer)"
    return Answer(f"{text}:\n{search_text(summary, 1)}", data)
