"""The rules of thumb that a layout follows, and warnings for layouts that break them."""

from spanax.plan.candidate import Candidate, Search
from spanax.units import bytes_text


def rule(found: Search, one: Candidate) -> str:
    """Returns the reasons for a layout, in the terms of the decision guide.

    The guide: a state that fits is replicated (data parallel); otherwise it is sharded (FSDP), inside the fast domain
    first (HSDP); layers are sharded (tensor) where they are too large or the batch per device too small for FSDP;
    sequences (context) and experts where there are many; stages (pipeline) only after all other axes.
    """
    axes = dict(one.mesh.axes)
    limit = found.cluster.memory_bytes
    state_bytes = sum(leaf.num_bytes for leaf in next(iter(found.programs.values())).leaves)
    fits = limit is None or state_bytes <= limit / 2
    state = f"the state ({bytes_text(state_bytes)})"
    parallel = ": data parallel" if one.mesh.size == axes.get("data", 1) else ""
    parts = [f"{state} fits on a device{parallel}" if fits else f"{state} does not fit on a device"]
    if axes.get("fsdp", 1) > 1:
        arrays = {"fsdp": "all of it is", "zero1": "optimizer state is", "zero2": "optimizer and gradients are"}
        parts.append(f"{arrays[one.storing]} stored over fsdp={axes['fsdp']}")
        if axes.get("data", 1) > 1:
            domain = " across slower links" if one.mesh.size > found.cluster.devices_per_node else ""
            parts.append(f"copied data={axes['data']} times{domain}")
    if axes.get("model", 1) > 1:
        inside = axes["model"] <= found.cluster.devices_per_node
        parts.append(f"layers are split model={axes['model']} ways, {'inside' if inside else 'ACROSS'} a node")
    if axes.get("context", 1) > 1:
        parts.append(f"sequences are split context={axes['context']} ways")
    if axes.get("expert", 1) > 1:
        parts.append(f"experts are split expert={axes['expert']} ways")
    if one.num_stages > 1:
        parts.append(f"layers are in {one.num_stages} stages, for the rest across nodes")
    if one.remat == "full":
        parts.append("activations are computed twice for want of memory")
    return "; ".join(parts)


def warnings(found: Search, own: Candidate) -> list[str]:
    """Returns warnings about a user-supplied layout compared to the best layout, with their costs.

    Args:
      found: a search over all layouts.
      own: the user-supplied candidate.
    """
    best = found.best
    lines = []
    if best is not None and own.step_seconds > 1.02 * best.step_seconds:
        more = 100 * (own.step_seconds / best.step_seconds - 1)
        lines.append(
            f"{own.layout} on {own.mesh} takes {more:.0f} % longer than {best.layout} on {best.mesh} "
            f"({own.step_seconds:.3g} s against {best.step_seconds:.3g} s a step)"
        )
    model = dict(own.mesh.axes).get("model", 1)
    if model > found.cluster.devices_per_node:
        lines.append(f"model={model} spans nodes of {found.cluster.devices_per_node}: its sums go over slow links")
    if own.num_stages > 1 and best is not None and best.num_stages == 1:
        lines.append("stages are not needed here: a layout without them is faster")
    return lines
