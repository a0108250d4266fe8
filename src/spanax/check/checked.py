"""Checked: one plan with all that rules look at, each part worked out when a rule first asks for it."""

from dataclasses import dataclass
from functools import cached_property

from spanax.check.report import Report
from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Candidate, Search
from spanax.plan.own import candidate_of
from spanax.plan.plan import Plan
from spanax.plan.search import search
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class Checked:
    """A plan, the program it is for, and the devices; with what XLA made of it, where that is known."""

    program: Program
    plan: Plan
    cluster: Cluster
    report: Report | None = None

    @cached_property
    def own(self) -> Candidate:
        """The plan's own price."""
        return candidate_of(self.program, self.plan, self.cluster)

    @cached_property
    def others(self) -> Search:
        """Everything else that could be done on these devices, without stages and with the plan's own remat."""
        return search(
            self.program, self.cluster, remat=(self.own.remat,), top=100_000, pipeline=False,
            pins={name: to or None for name, to in self.plan.pins},
        )  # fmt: skip

    def ways(self, axes: tuple[str, ...]) -> int:
        """How many parts something split over mesh axes has."""
        return self.plan.mesh.ways(axes)

    def spans_nodes(self, axis: str) -> bool:
        """Whether a group along a mesh axis reaches beyond the fast domain; the last axis has neighbours in it."""
        names = self.plan.mesh.names
        return self.plan.mesh.ways(names[names.index(axis) :]) > self.cluster.devices_per_node
