"""Checked: one plan with all that rules look at, each part worked out when a rule first asks for it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spanax.check.report import Report
from spanax.displays import display
from spanax.errors import NoLayoutError
from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Candidate
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan
from spanax.plan.search import search
from spanax.plan.sharding.place import resolver_of
from spanax.plan.sharding.resolve import Resolver
from spanax.trace.analysis.training_signal import Problem, flaws
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class Checked:
    """A plan, the program it is for, and the devices; with what XLA made of it, where that is known."""

    program: Program
    plan: Plan
    cluster: Cluster
    report: Report | None = None

    def _repr_html_(self) -> str | None:
        return display(self)

    @cached_property
    def flaws(self) -> list[Problem]:
        """What keeps the program's parameters from learning."""
        return flaws(self.program)

    @cached_property
    def own(self) -> Candidate:
        """The plan's own price."""
        return evaluate(self.program, self.plan, self.cluster).candidate

    @cached_property
    def others(self) -> tuple[Candidate, ...]:
        """All else that fits on these devices, the fastest first; without stages and with the plan's own remat."""
        try:
            found = search(
                self.program, self.cluster, remat=(self.own.remat,), top=100_000, pipeline=False,
                pins={name: to or None for name, to in self.plan.pins},
            )  # fmt: skip
        except NoLayoutError:
            return ()  # the answer: the plan, of the user's own axes or pins, has nothing to be compared with
        return found.candidates

    @cached_property
    def own_among_others(self) -> Candidate:
        """The plan's price as the search has it, which prices meshes by the family; else the plan's own."""

        def key(one: Candidate) -> tuple[Any, ...]:
            sizes = tuple((axis, size) for axis, size in one.mesh.axes if size > 1)
            return one.layout, one.storing, sizes, one.num_stages, one.remat, one.microbatches

        return next((one for one in self.others if key(one) == key(self.own)), self.own)

    def ways(self, axes: tuple[str, ...]) -> int:
        """How many parts something split over mesh axes has."""
        return self.plan.mesh.ways(axes)

    def names_for(self, axis: str) -> tuple[str, ...]:
        """The named axes that a mesh axis is to split, pins first."""
        pinned = tuple(name for name, to in self.plan.pins if axis in to)
        moved = {name for name, _ in self.plan.pins}
        return pinned + tuple(name for name in self.plan.layout.splits(axis) if name not in moved)

    @cached_property
    def resolver(self) -> Resolver:
        """The resolver that made the plan."""
        return resolver_of(self.program, self.plan)

    def splits_sequence(self, axis: str) -> bool:
        """Whether a mesh axis splits a sequence of the program."""
        classes = self.resolver.assignment.ranks.get(axis, {})
        return any(label in classes for label in self.program.step.labels_by_name.get("seq", ()))

    def spans_nodes(self, axis: str) -> bool:
        """Whether a group along a mesh axis reaches beyond the fast domain; the last axis has neighbours in it."""
        names = self.plan.mesh.names
        return self.plan.mesh.ways(names[names.index(axis) :]) > self.cluster.devices_per_node
