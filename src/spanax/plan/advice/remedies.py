"""Suggests options that make a program fit where no layout fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.plan.advice.what_if import fewest_devices
from spanax.plan.candidate import Candidate, Search
from spanax.plan.candidates.request import Request
from spanax.plan.defaults import default_chunks, defaults
from spanax.plan.pipeline.stages import ANY
from spanax.plan.plan import Schedule
from spanax.trace.jaxpr.remat_policies import OPTIMIZER_STATE
from spanax.trace.program import Program

MOST = 16
"""The largest multiple of the requested number of devices to price."""

Find = Callable[[Program, Cluster, Request], Search]
"""Searches the layouts of a request, as `spanax.plan.choose.searched`."""

Option = tuple[str, Callable[[Request], Request]]
"""An option of the command line, and the function that returns a request with it."""

NARROW_STATE = "--optimizer-state bfloat16"


def remedies(result: Search, program: Program, request: Request, find: Find) -> list[str]:
    """Returns command-line options, each of which makes the program fit together with all others of the request.

    Each is the request with one change, which the same search prices. Where no single option is enough, the first entry
    joins several.

    Args:
      result: the search of the request; nothing is suggested if some layout fits.
      program: the program that was searched.
      request: the requirements of the plan.
      find: the function that searched.
    """
    limit = result.cluster.memory_bytes
    if result.best is not None:
        return []
    if not result.nearest or limit is None:
        size = -(-result.batch_size // result.cluster.num_devices) * result.cluster.num_devices
        size = size if size != result.batch_size else 2 * size
        return [f"another --global-batch-size, such as {size}, another layout, mesh or number of devices"]
    asked = _Asked(program, result.cluster, request, find, limit, result.nearest[0])
    priced = [(option, asked.needed(option)) for option in _options(asked, result)]
    lines = [text for (text, _), needed in priced if needed <= limit]
    lines = lines or _joined(asked, [option for option, needed in priced if needed < asked.leanest.upper_bytes])
    lines += [*_other_layout(asked), *_more_devices(asked, result)]
    return lines or ["a smaller model, or a chip with more memory"]


@dataclass(frozen=True)
class _Asked:
    """A request for which nothing fits into `limit` bytes, and the layout that needs least."""

    program: Program
    cluster: Cluster
    request: Request
    find: Find
    limit: int
    leanest: Candidate

    def search(self, request: Request, cluster: Cluster | None = None) -> Search | None:
        """Returns the search of another request; None if it cannot be carried out."""
        try:
            return self.find(self.program, cluster or self.cluster, request)
        except SpanaxError:
            return None  # an expected result: an option that the program or these devices do not support

    def leanest_of(self, request: Request) -> Candidate | None:
        """Returns the fastest candidate of another request that fits, or that with the lowest memory, or None."""
        found = self.search(request)
        candidates = () if found is None else (*found.candidates, *found.nearest)
        return next((each for each in candidates if each.num_stages > 1 or not self.needs_stages), None)

    def needed(self, *options: Option) -> float:
        """Returns the lowest memory of the request with some options; if it is open, that of the leanest layout."""
        request = self.request
        for _, change in options:
            request = change(request)
        leanest: Candidate | None = self.leanest
        if request != self.request:
            placed = replace(request, layout=self.leanest.layout, mesh=self.leanest.whole_mesh)
            leanest = self.leanest_of(request if request.is_placed else placed)
        is_narrow = any(text == NARROW_STATE for text, _ in options)
        return inf if leanest is None else leanest.upper_bytes - is_narrow * leanest.memory["optimizer"] / 2

    @property
    def needs_stages(self) -> bool:
        """Whether a schedule of stages is requested, which no layout without stages can have."""
        schedule = self.request.schedule
        if schedule is None or schedule.pipeline == ANY:
            return False
        return self.request.has_stages or schedule.pipeline != Schedule().pipeline


def _options(asked: _Asked, result: Search) -> Iterator[Option]:
    """Yields every option that lowers the memory of a layout, and that the search did not try."""
    request = asked.request
    chip = asked.cluster.chip
    moments = [leaf for leaf in asked.program.leaves if leaf.kind == OPTIMIZER_STATE and leaf.shape]
    if (request.schedule and request.schedule.microbatches) or not defaults(asked.cluster).is_searched:
        yield from _microbatches(asked, result.batch_size)
    if "full" not in result.programs:
        yield "--remat full", partial(Request.scheduled, remat="full")
    if default_chunks(asked.program, asked.cluster, request.chunks):
        yield "--loss-chunks auto", partial(replace, loss_chunks="auto")
    if any(leaf.dtype == "float32" for leaf in moments):
        yield NARROW_STATE, replace
    if moments and not result.offload and chip.host_bytes_per_second is not None:
        yield "--offload optimizer", partial(replace, offload=(OPTIMIZER_STATE,))


def _microbatches(asked: _Asked, batch_size: int) -> Iterator[Option]:
    """Yields the fewest microbatches with which a layout fits, or those that lower the memory most."""
    best: list[Option] = []
    least = float(asked.leanest.upper_bytes)
    count = 2 * asked.leanest.microbatches
    while batch_size % count == 0 and least > asked.limit:
        option = f"--microbatches {count}", partial(Request.scheduled, microbatches=count)
        needed = asked.needed(option)
        if needed >= least:
            break
        best, least, count = [option], needed, 2 * count
    yield from best


def _joined(asked: _Asked, options: list[Option]) -> list[str]:
    """Returns the first options that are enough together, without those that save nothing; none if all are too few."""
    joined = options[:1]
    least = asked.needed(*joined)
    for option in options[1:]:
        needed = asked.needed(*joined, option)
        if needed < least:
            joined.append(option)
            least = needed
        if least <= asked.limit:
            return [" with ".join(text for text, _ in joined)]
    return []


def _other_layout(asked: _Asked) -> list[str]:
    """Returns the fastest other layout that fits, if one was requested."""
    request = asked.request
    if not request.is_placed:
        return []
    others = replace(request, layout=None, mesh=None, sequence_parallel=False)
    # Without a request, the search of a layout neither pads nor offloads.
    found = asked.search(replace(others, pad=request.pad or "none", offload=request.offload or ()))
    for preset in (each for each in (found.candidates if found else ()) if not each.assigned):
        again = asked.leanest_of(replace(request, layout=preset.layout, mesh=preset.whole_mesh))
        if again is not None and again.upper_bytes <= asked.limit:
            return [f"--layout {preset.layout} --mesh {preset.whole_mesh}"]
    return []


def _more_devices(asked: _Asked, result: Search) -> list[str]:
    """Returns the fewest devices on which a layout fits, in powers of two times the cluster, if at most MOST times.

    A requested layout is not replaced by another; a requested mesh, which has the number of devices, is.
    """
    request = asked.request
    if request.mesh is not None:
        request = replace(request, mesh=None, layout=request.layout or asked.leanest.layout)
    if "full" in result.programs:
        request = request.scheduled(remat="full")  # of the policies that the search may choose, that which stores least
    first = 2
    while asked.leanest.state_bytes / first > asked.limit:
        first *= 2
    count = asked.cluster.num_devices
    found = fewest_devices(partial(asked.search, request), asked.cluster, first * count, MOST * count)
    if found is None or found.best is None or (asked.needs_stages and found.best.num_stages == 1):
        return []
    mesh = "" if asked.request.mesh is None else f" with --mesh {found.best.whole_mesh}"
    return [f"{found.cluster.num_devices} devices{mesh}"]
