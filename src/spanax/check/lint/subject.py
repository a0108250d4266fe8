"""The subject of lint rules, a plan with its program and devices, and the messages that the rules yield."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spanax.check.report import Report
from spanax.errors import NoLayoutError
from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Candidate
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.plan.place import resolver_of
from spanax.plan.plan import Plan
from spanax.plan.search import search
from spanax.plan.sharding.resolve import Resolver
from spanax.trace.analysis.training_signal import Problem, flaws
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class LintSubject:
    """A plan, its program and its devices, with the report of `spanax.check` if the plan was checked."""

    program: Program
    plan: Plan
    cluster: Cluster
    report: Report | None = None

    @cached_property
    def flaws(self) -> list[Problem]:
        """The reasons why parameters of the program cannot train."""
        return flaws(self.program.step, self.program.leaves, has_loss=self.program.has_evaluation)

    @cached_property
    def cost(self) -> Evaluation:
        """The predicted cost of the plan."""
        return evaluate(self.program, self.plan, self.cluster)

    @property
    def candidate(self) -> Candidate:
        """The plan as a priced layout."""
        return self.cost.candidate

    def gathered_bytes(self, path: str, axes: str) -> int:
        """Returns the bytes per device and step of the planned all-gathers of one parameter over mesh axes."""
        return self.cost.collectives_of(path).get(axes, {}).get("all-gather", 0)

    @cached_property
    def alternatives(self) -> tuple[Candidate, ...]:
        """All candidates that fit on these devices, fastest first, without a pipeline and with the plan's remat."""
        try:
            searched = search(
                self.program,
                self.cluster,
                remat=(self.candidate.remat,),
                top=100_000,
                pipeline=False,
                attention="plain",
                assign=False,
                pins={name: to or None for name, to in self.plan.pins},
            )
        except NoLayoutError:
            return ()  # No preset layout supports the mesh axes or pins of the user.
        return searched.candidates

    @cached_property
    def searched_candidate(self) -> Candidate:
        """The plan as priced by the search, which evaluates meshes by family; `candidate` if the search lacks it."""

        def key(entry: Candidate) -> tuple[Any, ...]:
            sizes = tuple((axis, size) for axis, size in entry.mesh.axes if size > 1)
            return entry.layout, entry.storing, sizes, entry.num_stages, entry.remat, entry.microbatches

        return next((entry for entry in self.alternatives if key(entry) == key(self.candidate)), self.candidate)

    def num_shards(self, axes: tuple[str, ...]) -> int:
        """Returns the number of shards of a dim that is sharded over mesh axes."""
        return self.plan.mesh.ways(axes)

    def dims_of(self, axis: str) -> tuple[str, ...]:
        """Returns the named dims that a mesh axis should shard, pinned dims first."""
        pinned = tuple(name for name, to in self.plan.pins if axis in to)
        moved = {name for name, _ in self.plan.pins}
        return pinned + tuple(name for name in self.plan.layout.splits(axis) if name not in moved)

    @cached_property
    def resolver(self) -> Resolver:
        """The resolver that produced the plan."""
        return resolver_of(self.program, self.plan)

    def shards_sequence(self, axis: str) -> bool:
        """Returns whether a mesh axis shards a sequence dim of the program."""
        classes = self.resolver.assignment.ranks.get(axis, {})
        return any(label in classes for label in self.program.step.labels_by_name.get("seq", ()))

    def spans_nodes(self, axis: str) -> bool:
        """Returns whether groups along a mesh axis span nodes; consecutive devices vary along the last axis first."""
        names = self.plan.mesh.names
        return self.plan.mesh.ways(names[names.index(axis) :]) > self.cluster.devices_per_node


@dataclass(frozen=True)
class Message:
    """A problem that a rule reports, without the code and severity of the rule.

    Attributes:
      path: the array or mesh axis; empty for the plan as a whole.
      message: one sentence with the values.
      fix: the nearest change that resolves it, or empty.
      num_bytes: the bytes per device concerned, or 0.
      is_error: whether the problem is an error although its rule is only a warning.
    """

    path: str
    message: str
    fix: str = ""
    num_bytes: int = 0
    is_error: bool = False
