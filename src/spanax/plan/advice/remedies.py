"""Suggests options that make a program fit where no layout fits."""

from collections.abc import Iterator, Sequence

from spanax.errors import NoLayoutError, SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.plan.advice.what_if import cluster_of_size
from spanax.plan.candidate import Candidate, Search
from spanax.plan.candidates.loss_chunks import chunks_to_try
from spanax.plan.reason import Code, Reason
from spanax.plan.search import search
from spanax.trace.jaxpr.remat_policies import OPTIMIZER_STATE
from spanax.trace.program import Program

MOST = 16
"""The largest multiple of the requested number of devices to price."""


def remedies(result: Search) -> list[str]:
    """Returns command-line options, each of which makes the program fit.

    Where no single option is enough, the first entry joins all options that lower the memory.

    Args:
      result: a search where nothing fits.
    """
    if not result.nearest or result.cluster.memory_bytes is None:
        size = -(-result.batch_size // result.cluster.num_devices) * result.cluster.num_devices
        size = size if size != result.batch_size else 2 * size
        return [f"another --global-batch-size, such as {size}, another layout, mesh or number of devices"]
    program = next(iter(result.programs.values()))
    leanest = result.nearest[0]
    switches = list(_switches(result, program, leanest, result.cluster.memory_bytes))
    enough = [text for text, fits in switches if fits]
    joined = " with ".join(text for text, fits in switches if not fits)
    lines = enough or [joined] * bool(joined)
    if devices := _more_devices(result, program, leanest):
        lines.append(f"{devices} devices")
    return lines or ["a smaller model, or a chip with more memory"]


def _switches(previous: Search, program: Program, leanest: Candidate, limit: float) -> Iterator[tuple[str, bool]]:
    """Yields every option that lowers the memory of the leanest layout, and whether it alone makes it fit."""
    same_layout = _search(previous, program, leanest.remat, leanest)
    if same_layout.best is not None:
        yield f"--microbatches {same_layout.best.microbatches}", True
    elif same_layout.nearest and same_layout.nearest[0].upper_bytes < leanest.upper_bytes:
        yield f"--microbatches {same_layout.nearest[0].microbatches}", False
    if leanest.remat != "full" and "full" not in previous.programs and _has_full(program):
        full = _search(previous, program, "full", leanest)
        yield "--remat full", full.best is not None
    count, saved = chunks_to_try(previous)
    if count > 1:
        yield f"--loss-chunks {count}", leanest.upper_bytes - saved <= limit
    optimizer = leanest.memory["optimizer"]
    if any(leaf.kind == "optimizer" and leaf.shape and leaf.dtype == "float32" for leaf in program.leaves):
        yield "--optimizer-state bfloat16", leanest.upper_bytes - optimizer / 2 <= limit
    if optimizer and not previous.offload and previous.cluster.chip.host_bytes_per_second is not None:
        offloaded = _search(previous, program, leanest.remat, leanest, (OPTIMIZER_STATE,))
        yield "--offload optimizer", offloaded.best is not None
    if Reason(Code.NOT_REQUESTED) in previous.rejected:
        best = _search_all(previous, program, previous.cluster, None).best
        if best is not None:
            yield f"--layout {best.layout} --mesh {best.whole_mesh}", True


def _search(
    previous: Search, program: Program, remat: str, candidate: Candidate, offload: Sequence[str] | None = None
) -> Search:
    """Returns a search of the layout of a candidate under a policy, with any number of microbatches."""
    has_train_step = not program.rewrites_loss
    return search(
        program,
        previous.cluster,
        remat=(remat,),
        layout=candidate.layout,
        mesh=candidate.mesh,
        pins=previous.pins,
        top=1,
        pipeline=candidate.num_stages > 1,
        microbatches=program.microbatches if has_train_step else None,
        attention="plain",
        offload=previous.offload if offload is None else offload,
    )


def _search_all(
    previous: Search, program: Program, cluster: Cluster, remat: Sequence[str] | None, like: Candidate | None = None
) -> Search:
    """Returns a search of all presets, or of that of a candidate, on a cluster; the program has its attention."""
    return search(
        program,
        cluster,
        layout=None if like is None else like.layout,
        pipeline=like is None or like.num_stages > 1,
        remat=remat,
        pins=previous.pins,
        top=1,
        attention="plain",
        assign=False,
        offload=previous.offload,
    )


def _has_full(program: Program) -> bool:
    """Whether the program has layers whose activations can be recomputed."""
    try:
        program.variant(remat="full")
    except SpanaxError:
        return False  # an expected result: a loss without layers, or a custom train_step
    return True


def _more_devices(previous: Search, program: Program, leanest: Candidate) -> int | None:
    """Returns the fewest devices on which a layout fits, in powers of two times the cluster; None beyond MOST.

    A requested layout is not replaced by another.
    """
    limit = previous.cluster.memory_bytes or 0
    cluster = previous.cluster
    remat = "full" if _has_full(program) else leanest.remat
    like = leanest if Reason(Code.NOT_REQUESTED) in previous.rejected else None
    for factor in (2**power for power in range(1, MOST.bit_length())):
        if leanest.state_bytes / factor > limit:
            continue
        larger = cluster_of_size(cluster, factor * cluster.num_devices)
        try:
            result = None if larger is None else _search_all(previous, program, larger, (remat,), like)
        except NoLayoutError:
            continue  # this number of devices does not divide the batch
        if larger is not None and result is not None and result.best is not None:
            return larger.num_devices
    return None
