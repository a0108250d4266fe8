"""The layouts in which a model generates: the time of prefill and decode step, and their memory."""

from dataclasses import dataclass, replace

from spanax.errors import NoLayoutError
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidate import Candidate
from spanax.plan.candidates.request import STATE_FRACTION
from spanax.plan.search import search
from spanax.trace.jaxpr.remat_policies import AS_WRITTEN
from spanax.trace.program import Program

ALL = 1 << 16
"""More layouts than a program has on any cluster."""

MOST_SECANTS = 6
"""How often memory is computed for another number of sequences, to find the largest."""


@dataclass(frozen=True)
class GenerationPrograms:
    """What generates; both programs have the caches as state.

    Attributes:
      prefill: the logits and caches of sequences of tokens.
      step: the logits after one more token of each sequence.
      num_sequences: the sequences that generate together; more may be traced, whose share is priced.
      length: the number of positions of a sequence.
      cache_bytes: the bytes of the caches of one sequence.
    """

    prefill: Program
    step: Program
    num_sequences: int
    length: int
    cache_bytes: int

    @property
    def dtype(self) -> str:
        """The dtype of most parameters."""
        leaves = [leaf for leaf in self.step.leaves if leaf.kind == "param"]
        return str(max(leaves, key=lambda leaf: leaf.num_bytes).dtype)


def are_gathered(num_bytes: float, limit: float | None) -> bool:
    """Whether parameters are gathered once, over the axes of the sequences: if they then fill at most half a device."""
    return limit is None or num_bytes <= STATE_FRACTION * limit


@dataclass(frozen=True)
class GenerationLayout:
    """One layout, with its bytes per device.

    Attributes:
      step: the decode step in it.
      prefill: the prefill in it.
      cache_scale: the sequences, over those of the traced programs, whose caches the memory of both has.
      is_gathered: whether `spanax.generate` gathers parameters that `fsdp` shards once, as in `data`, which is priced.
    """

    step: Candidate
    prefill: Candidate
    cache_scale: float
    is_gathered: bool = False

    @property
    def parameter_bytes(self) -> int:
        """The parameters."""
        return self.step.memory["parameters"]

    @property
    def cache_bytes(self) -> int:
        """The caches."""
        return round(self.cache_scale * self.step.memory["other state"])

    @property
    def activation_bytes(self) -> int:
        """Everything else at the peak."""
        return self.peak_bytes - self.parameter_bytes - self.cache_bytes

    @property
    def peak_bytes(self) -> int:
        """The larger peak of both."""
        return max(self.step.peak_bytes, self.prefill.peak_bytes) + self._more_caches

    @property
    def upper_bytes(self) -> int:
        """The upper estimate of it, by which the layout fits."""
        larger = max(self.step, self.prefill, key=lambda each: each.upper_bytes)
        return larger.upper_bytes + round(self._more_caches * larger.upper_bytes / larger.peak_bytes)

    def is_stored(self, limit: float | None) -> bool:
        """Whether `spanax.generate` leaves parameters as stored: no `fsdp` shards them, or they do not fit."""
        ways = self.step.whole_mesh.ways(["fsdp"])
        return ways == 1 or not are_gathered(self.parameter_bytes * ways, limit)

    @property
    def _more_caches(self) -> int:
        return self.cache_bytes - self.step.memory["other state"]


@dataclass(frozen=True)
class GenerationPlan:
    """The layouts of a generation on a cluster.

    Attributes:
      programs: prefill and decode step.
      cluster: the devices.
      num_sequences: the sequences that generate together.
      layouts: those that fit, the fastest decode step first.
      nearest: the one that needs least memory, if none fits.
    """

    programs: GenerationPrograms
    cluster: Cluster
    num_sequences: int
    layouts: tuple[GenerationLayout, ...]
    nearest: GenerationLayout | None

    @property
    def best(self) -> GenerationLayout | None:
        """The fastest layout that fits, or None."""
        return self.layouts[0] if self.layouts else None

    def tokens_per_second(self, layout: GenerationLayout) -> float:
        """Returns the new tokens of all sequences per second."""
        return self.num_sequences / layout.step.step_seconds


def generation_plan(
    programs: GenerationPrograms,
    cluster: Cluster,
    *,
    num_sequences: int | None = None,
    layout: str | None = None,
    mesh: str | MeshShape | None = None,
) -> GenerationPlan:
    """Returns the layouts of a generation, priced. Uses no devices.

    Args:
      programs: prefill and decode step.
      cluster: the devices.
      num_sequences: the sequences that generate together; those of the programs by default.
      layout: prices only this layout.
      mesh: prices only this mesh.

    Raises:
      SpanaxError: as `spanax.search`.
    """
    traced = programs.step.batch_size
    count = num_sequences or programs.num_sequences
    found = [
        search(
            program, cluster, batch_size=count, top=ALL, layout=layout, mesh=mesh,
            remat=(AS_WRITTEN,), microbatches=1, attention="plain", ring=False, assign=False,
        )
        for program in (programs.step, programs.prefill)
    ]  # fmt: skip
    steps, prefills = ((*each.candidates, *each.too_large) for each in found)
    if not steps:
        what = f"no layout divides {count} sequences over {cluster}."
        raise NoLayoutError(what, fix="another --layout or --mesh, or a multiple of the devices as --global-batch-size")
    by_title = {each.title: each for each in prefills}
    limit = cluster.memory_bytes
    layouts = [GenerationLayout(each, by_title[each.title], count / traced) for each in steps if each.title in by_title]
    if layout is None and mesh is None:
        layouts = [each for each in layouts if each.is_stored(limit)]
    layouts = [each if each.is_stored(limit) else _gathered(programs, cluster, count, each) for each in layouts]
    layouts.sort(key=lambda each: each.step.step_seconds)
    fitting = [each for each in layouts if limit is None or each.upper_bytes <= limit]
    nearest = None if fitting else min(layouts, key=lambda each: each.upper_bytes, default=None)
    return GenerationPlan(programs, cluster, count, tuple(fitting), nearest)


def _gathered(
    programs: GenerationPrograms, cluster: Cluster, num_sequences: int, layout: GenerationLayout
) -> GenerationLayout:
    """Returns a layout with the cost of that in which its parameters are gathered: `data` in place of `fsdp`."""
    axes = dict(layout.step.whole_mesh.axes)
    axes["data"] = axes.pop("fsdp") * axes.get("data", 1)
    plan = generation_plan(programs, cluster, num_sequences=num_sequences, mesh=MeshShape.of(axes))
    whole = plan.best or plan.nearest
    assert whole is not None
    step = replace(whole.step, layout=layout.step.layout, mesh=layout.step.mesh)
    return replace(whole, step=step, is_gathered=True)


def most_sequences(plan: GenerationPlan) -> int | None:
    """Returns about the most sequences that fit in the best layout, in multiples of the devices; None for none.

    Memory grows linearly between a few numbers of sequences: a secant finds where it reaches that of a device.
    """
    cluster = plan.cluster
    layout = plan.best or plan.nearest
    limit = cluster.memory_bytes
    if layout is None or limit is None:
        return None
    known = dict[int, int]()
    name = layout.step.layout
    mesh = str(layout.step.whole_mesh)
    latest = [cluster.num_devices, 2 * cluster.num_devices]
    for _ in range(MOST_SECANTS):
        for count in latest:
            if count not in known:
                at_count = generation_plan(plan.programs, cluster, num_sequences=count, layout=name, mesh=mesh)
                both = (*at_count.layouts, at_count.nearest)
                known[count] = max(each.upper_bytes for each in both if each is not None)
        first, second = latest
        slope = (known[second] - known[first]) / (second - first)
        room = (limit - known[second]) / max(slope, 1.0)
        reached = max(int(second + room) // cluster.num_devices, 1) * cluster.num_devices
        if reached in known:
            break
        latest = [second, reached]
    return max((count for count, num_bytes in known.items() if num_bytes <= limit), default=None)
