"""The rules of thumb that a layout follows, and warnings for layouts that break them."""

from spanax.plan.candidate import Candidate, Search
from spanax.units import bytes_text


def rule(search: Search, candidate: Candidate) -> str:
    """Returns the reasons for a layout, in the terms of the decision guide.

    The guide: a state that fits is replicated (data parallel); otherwise it is sharded (FSDP), inside the fast domain
    first (HSDP); layers are sharded (tensor) where they are too large or the batch per device too small for FSDP;
    sequences (context) and experts where there are many; stages (pipeline) only after all other axes.
    """
    axes = dict(candidate.mesh.axes)
    limit = search.cluster.memory_bytes
    state_bytes = sum(leaf.num_bytes for leaf in next(iter(search.programs.values())).leaves)
    fits = limit is None or state_bytes <= limit / 2
    state = f"the state ({bytes_text(state_bytes)})"
    parallel = ": data parallel" if candidate.mesh.size == axes.get("data", 1) else ""
    parts = [f"{state} fits on a device{parallel}" if fits else f"{state} does not fit on a device"]
    if axes.get("fsdp", 1) > 1:
        arrays = {"fsdp": "all of it is", "zero1": "optimizer state is", "zero2": "optimizer and gradients are"}
        parts.append(f"{arrays[candidate.storing]} stored over fsdp={axes['fsdp']}")
        if axes.get("data", 1) > 1:
            domain = " across slower links" if candidate.mesh.size > search.cluster.devices_per_node else ""
            parts.append(f"replicated over data={axes['data']}{domain}")
    if axes.get("model", 1) > 1:
        inside = axes["model"] <= search.cluster.devices_per_node
        parts.append(f"layers are sharded over model={axes['model']}, {'inside a node' if inside else 'across nodes'}")
    if axes.get("context", 1) > 1:
        parts.append(f"sequences are sharded over context={axes['context']}")
    if axes.get("expert", 1) > 1:
        parts.append(f"experts are sharded over expert={axes['expert']}")
    if candidate.num_stages > 1:
        parts.append(f"layers are partitioned into {candidate.num_stages} stages across nodes")
    if candidate.remat == "full":
        parts.append("activations are recomputed to save memory")
    return "; ".join(parts)


def warnings(search: Search, candidate: Candidate) -> list[str]:
    """Returns warnings about a user-supplied layout compared to the best layout, with their costs.

    Args:
      search: a search over all layouts.
      candidate: the user-supplied candidate.
    """
    best = search.best
    lines = []
    if best is not None and candidate.step_seconds > 1.02 * best.step_seconds:
        more = 100 * (candidate.step_seconds / best.step_seconds - 1)
        lines.append(
            f"{candidate.layout} on {candidate.mesh} takes {more:.0f} % longer than {best.layout} on {best.mesh} "
            f"({candidate.step_seconds:.3g} s against {best.step_seconds:.3g} s per step)"
        )
    model = dict(candidate.mesh.axes).get("model", 1)
    if model > search.cluster.devices_per_node:
        lines.append(
            f"model={model} spans nodes of {search.cluster.devices_per_node}: its all-reduces cross slow links"
        )
    if candidate.num_stages > 1 and best is not None and best.num_stages == 1:
        lines.append("stages are not needed here: a layout without them is faster")
    return lines
