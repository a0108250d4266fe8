"""Suggests options that would make a program fit where no layout does."""

from collections.abc import Iterator

from spanax.errors import NoLayoutError, SpanaxError
from spanax.plan.advice.what_if import cluster_of_size
from spanax.plan.candidate import RESERVE, Candidate, Search
from spanax.plan.loss_chunks import chunks_to_try
from spanax.plan.search import UNASKED, search
from spanax.trace.program import Program

MOST = 16
"""Clusters larger than this multiple of the requested one are not priced."""


def remedies(found: Search) -> list[str]:
    """Returns the requests, as switches of the command line, of which each makes the program fit.

    Where none does alone, the first entry joins all that lower the memory.

    Args:
      found: a search in which nothing fits.
    """
    if not found.nearest or found.cluster.memory_bytes is None:
        return ["another batch size or another number of devices"]
    program, leanest = next(iter(found.programs.values())), found.nearest[0]
    switches = list(_switches(found, program, leanest, found.cluster.memory_bytes * (1 - RESERVE)))
    enough = [text for text, fits in switches if fits]
    joined = " with ".join(text for text, fits in switches if not fits)
    lines = enough or [joined] * bool(joined)
    if devices := _more_devices(found, program, leanest):
        lines.append(f"{devices} devices")
    return lines or ["a smaller model, or a chip with more memory"]


def _switches(found: Search, program: Program, leanest: Candidate, limit: float) -> Iterator[tuple[str, bool]]:
    """Yields every switch that lowers the memory of the leanest layout, and whether it is enough by itself."""
    alike = _search(found, program, leanest.remat, leanest)
    if alike.best is not None:
        yield f"--microbatches {alike.best.microbatches}", True
    elif alike.nearest and alike.nearest[0].peak_bytes < leanest.peak_bytes:
        yield f"--microbatches {alike.nearest[0].microbatches}", False
    if leanest.remat != "full" and "full" not in found.programs and _has_full(program):
        full = _search(found, program, "full", leanest)
        yield "--remat full", full.best is not None
    count, saved = chunks_to_try(found)
    if count > 1:
        yield f"--loss-chunks {count}", leanest.peak_bytes - saved <= limit
    optimizer = leanest.memory["optimizer"]
    if any(leaf.kind == "optimizer" and leaf.shape and leaf.dtype == "float32" for leaf in program.leaves):
        yield "--optimizer-state bfloat16", leanest.peak_bytes - optimizer / 2 <= limit
    if UNASKED in found.rejected:
        other = search(program, found.cluster, pins=found.pins, top=1).best
        if other is not None:
            yield f"--layout {other.layout} --mesh {other.mesh}", True


def _search(found: Search, program: Program, remat: str, one: Candidate) -> Search:
    """Returns the layout of a candidate, priced under a policy with any number of microbatches."""
    own_step = program.evaluation is None
    return search(
        program, found.cluster, remat=(remat,), layout=one.layout, mesh=one.mesh, pins=found.pins, top=1,
        pipeline=one.num_stages > 1, microbatches=program.microbatches if own_step else None,
    )  # fmt: skip


def _has_full(program: Program) -> bool:
    """Whether the program has layers whose activations can be computed again."""
    try:
        program.with_remat("full")
    except SpanaxError:
        return False  # the answer, not a failure: a loss without layers, or a train_step of its own
    return True


def _more_devices(found: Search, program: Program, leanest: Candidate) -> int | None:
    """Returns the fewest devices of the same kind on which a layout fits, in powers of two; None beyond MOST times."""
    limit, here = (found.cluster.memory_bytes or 0) * (1 - RESERVE), found.cluster
    remat = "full" if _has_full(program) else leanest.remat
    for factor in (2**power for power in range(1, MOST.bit_length())):
        if leanest.state_bytes / factor > limit:
            continue
        there = cluster_of_size(here, factor * here.num_devices)
        try:
            more = None if there is None else search(program, there, remat=(remat,), pins=found.pins, top=1)
        except NoLayoutError:
            continue  # the batch does not divide so many devices
        if there is not None and more is not None and more.best is not None:
            return there.num_devices
    return None
