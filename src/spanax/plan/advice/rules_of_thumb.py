"""The rules of thumb that a layout follows, and warnings for layouts that break them."""

import math

from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Candidate, Search
from spanax.plan.plan import Plan
from spanax.plan.presets import SPATIAL
from spanax.plan.sharding.resolve import axes_of
from spanax.units import bytes_text

MOSTLY = 0.5
"""The share of the parameters above which the text says that layers are sharded. Source: a judgment."""


def rule(search: Search, candidate: Candidate, plan: Plan) -> str:
    """Returns the reasons for a layout, in the terms of the decision guide; `plan` is that of the candidate.

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
        inside = _place(search.cluster, axes["model"])
        parts.append(f"{_sharded_over(plan, 'model')} sharded over model={axes['model']}, {inside}")
    if axes.get("context", 1) > 1:
        what = "images" if SPATIAL in plan.layout.name.split("+") else "sequences"
        parts.append(f"{what} are sharded over context={axes['context']}")
    if axes.get("expert", 1) > 1:
        parts.append(f"experts are sharded over expert={axes['expert']}")
    if candidate.num_stages > 1:
        where = _place(search.cluster, search.cluster.num_devices)
        parts.append(f"layers are partitioned into {candidate.num_stages} stages {where}")
    if candidate.remat == "full":
        parts.append("activations are recomputed to save memory")
    return "; ".join(parts)


def _place(cluster: Cluster, num_devices: int) -> str:
    """Returns where neighbors on mesh axes of this many devices are."""
    name = "slice" if cluster.is_torus else "node"
    return f"inside a {name}" if num_devices <= cluster.devices_per_node else f"across {name}s"


def _sharded_over(plan: Plan, axis: str) -> str:
    """Returns what a mesh axis shards: layers, or names of axes where it shards few of the parameters."""
    sizes = [(math.prod(leaf.shape), axis in axes_of(leaf.spec)) for leaf in plan.leaves if leaf.kind == "param"]
    share = sum(size for size, is_sharded in sizes if is_sharded) / max(1, sum(size for size, _ in sizes))
    if share >= MOSTLY:
        return "layers are"
    names = sorted(
        {
            name
            for leaf in (*plan.leaves, *plan.batch)
            for name, by in zip(leaf.axes, leaf.spec, strict=True)
            if name is not None and axis in by
        }
    )
    return f"{' and '.join(names) or 'activations'} ({100 * share:.0f} % of the parameters) are"


def warnings(search: Search, candidate: Candidate) -> list[str]:
    """Returns warnings about a user-supplied layout that is slower than the best layout, with their costs.

    Args:
      search: a search over all layouts.
      candidate: the user-supplied candidate.
    """
    best = search.best
    lines: list[str] = []
    if best is None or candidate.step_seconds <= best.step_seconds:
        return lines
    if candidate.step_seconds > 1.02 * best.step_seconds:
        more = 100 * (candidate.step_seconds / best.step_seconds - 1)
        lines.append(
            f"{candidate.title} takes {more:.0f} % longer than the best, {best.title} "
            f"({candidate.step_seconds:.3g} s against {best.step_seconds:.3g} s per step)"
        )
    model = dict(candidate.mesh.axes).get("model", 1)
    if model > search.cluster.devices_per_node:
        size = search.cluster.devices_per_node
        lines.append(f"model={model} is {_place(search.cluster, model)} of {size}: its all-reduces cross slow links")
    if candidate.num_stages > 1 and best.num_stages == 1:
        lines.append("stages are not needed here: a layout without them is faster")
    return lines
