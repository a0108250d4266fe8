"""How fused attention is sharded, and the mesh axis that its keys and values circulate around."""

from collections.abc import Sequence
from dataclasses import dataclass

from spanax.plan.sharding.resolve import Constraint, Spec
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.rewrites.attention.operation import BACKWARD, RING
from spanax.trace.rewrites.attention.scores import NONE, Form

Axes = tuple[str, ...]


@dataclass(frozen=True)
class AttentionSharding:
    """The mesh axes that divide each dim of an attention, by the form's labels.

    Keys that are divided as the queries are go around a ring of those devices; others are whole wherever queries are.
    """

    form: Form
    axes: tuple[Axes, ...]

    @property
    def ring(self) -> Axes:
        """The mesh axes of the ring, none where keys are whole."""
        return self.axes[self.form.keys]

    @property
    def used(self) -> frozenset[str]:
        """Every mesh axis that divides something."""
        return frozenset(axis for by in self.axes for axis in by)

    def rows(self, *, wide: bool) -> Spec:
        """The spec of what is laid out as the queries: with a width, or a number a row."""
        return (*self.axes[: self.form.keys], *([()] if wide else []))

    @property
    def keys(self) -> Spec:
        """The spec of keys and values."""
        return (*self.axes[: self.form.num_batch], self.ring, ())

    def extra(self, labels: Sequence[int]) -> Spec:
        """The spec of an extra: it has its part of the queries, and all keys."""
        return tuple(() if label in (NONE, self.form.keys) else self.axes[label] for label in labels)

    def extras(self, wanted: Sequence[bool] | None = None) -> list[Spec]:
        """The specs of all extras, or of some."""
        chosen = [True] * len(self.form.extras) if wanted is None else wanted
        return [self.extra(labels) for labels, is_one in zip(self.form.extras, chosen, strict=True) if is_one]

    def operands(self, op: Op) -> tuple[Spec, ...]:
        """The specs of an operation's operands."""
        rows, number = self.rows(wide=True), self.rows(wide=False)
        kept = (rows, number) if op.params["kernel"] else (number, number, number)
        behind = (rows, *kept) if op.name == BACKWARD else ()
        return (rows, self.keys, self.keys, *behind, *self.extras())

    def results(self, op: Op) -> tuple[Spec, ...]:
        """The specs of its results."""
        rows, number = self.rows(wide=True), self.rows(wide=False)
        if op.name == BACKWARD:
            return (rows, self.keys, self.keys, *self.extras(op.params["grads"]))
        return (rows, number) if op.params["kernel"] else (rows, number, number)


def attention_sharding(graph: Graph, op: Op, constraints: Sequence[Constraint | None]) -> AttentionSharding | None:
    """How an attention is divided, its batch as q, k and v all are, its queries as they lie; None of what is none.

    A kernel has whole sequences, and all queries that share keys.
    """
    if op.name not in RING:
        return None
    form: Form = op.params["form"]
    q, k, v = (_lies(graph, value, constraints) for value in op.inputs[:3])
    taken: set[str] = set()

    def some(axes: Sequence[str]) -> Axes:
        found = tuple(axis for axis in axes if axis not in taken)
        taken.update(found)
        return found

    batch = [some([axis for axis in q[dim] if axis in k[dim] and axis in v[dim]]) for dim in range(form.num_batch)]
    if op.params["kernel"]:
        return AttentionSharding(form, (*batch, *[()] * (form.num_rows + 2)))
    queries = some(q[form.queries])
    rows = [some(q[dim]) for dim in range(form.num_batch, form.queries)]
    return AttentionSharding(form, (*batch, *rows, queries, queries if k[form.num_batch] == queries else ()))


def _lies(graph: Graph, value: int, constraints: Sequence[Constraint | None]) -> Spec:
    lies = constraints[value]
    return ((),) * len(graph.shape(value)) if lies is None else lies.computed
