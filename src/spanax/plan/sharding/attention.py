"""How fused attention is sharded, and the ring of mesh axes that its keys and values circulate around."""

from collections.abc import Sequence
from dataclasses import dataclass

from spanax.plan.sharding.resolve import Constraint, Resolver, Spec, axes_of
from spanax.trace.analysis.labels import Labels, stacked_labels
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.remat_policies import RING as RING_CONTEXT
from spanax.trace.jaxpr.remat_policies import SPLASH
from spanax.trace.rewrites.attention.kernels import LANES, Kernel
from spanax.trace.rewrites.attention.operation import BACKWARD, FORWARD, RING
from spanax.trace.rewrites.attention.scores import NONE, Form

Axes = tuple[str, ...]


@dataclass(frozen=True)
class AttentionSharding:
    """The mesh axes that shard each dim of an attention operation, by the form's labels.

    Keys sharded as the queries are circulate around a ring of those devices; otherwise every device has all keys.
    """

    form: Form
    axes: tuple[Axes, ...]

    @property
    def ring(self) -> Axes:
        """The mesh axes of the ring; empty where keys are replicated."""
        return self.axes[self.form.keys]

    @property
    def used(self) -> frozenset[str]:
        """All mesh axes that shard a dim."""
        return frozenset(axes_of(self.axes))

    def rows(self, *, wide: bool) -> Spec:
        """Returns the spec of values with the rows of the queries: with a width if `wide`, else one number per row."""
        return (*self.axes[: self.form.keys], *([()] if wide else []))

    @property
    def keys(self) -> Spec:
        """The spec of keys and values."""
        return (*self.axes[: self.form.num_batch], self.ring, ())

    def extra(self, labels: Sequence[int]) -> Spec:
        """Returns the spec of an extra operand: sharded as the queries, with all keys."""
        return tuple(() if label in (NONE, self.form.keys) else self.axes[label] for label in labels)

    def extras(self, is_returned: Sequence[bool] | None = None) -> list[Spec]:
        """Returns the specs of all extra operands, or of those that `is_returned` selects."""
        selected = [True] * len(self.form.extras) if is_returned is None else is_returned
        return [
            self.extra(labels) for labels, is_selected in zip(self.form.extras, selected, strict=True) if is_selected
        ]

    def operands(self, op: Op) -> tuple[Spec, ...]:
        """Returns the specs of an operation's operands."""
        rows = self.rows(wide=True)
        row_stats = self.rows(wide=False)
        residuals = (rows, row_stats) if op.params["kernel"] else (row_stats, row_stats, row_stats)
        backward = (rows, *residuals) if op.name == BACKWARD else ()
        return (rows, self.keys, self.keys, *backward, *self.extras())

    def results(self, op: Op) -> tuple[Spec, ...]:
        """Returns the specs of an operation's results."""
        rows = self.rows(wide=True)
        row_stats = self.rows(wide=False)
        if op.name == BACKWARD:
            return (rows, self.keys, self.keys, *self.extras(op.params["grads"]))
        return (rows, row_stats) if op.params["kernel"] else (rows, row_stats, row_stats)


def attention_sharding(
    resolver: Resolver, graph: Graph, op: Op, constraints: Sequence[Constraint | None]
) -> AttentionSharding | None:
    """Returns how an attention operation is sharded; None for other operations.

    The batch is sharded where q, k and v all are, the queries as q is. Without a request for a ring, the last mesh axis
    that shards the sequence shards heads instead, where it divides them, with an all-to-all before and after. Others
    shard the sequence, a kernel's in whole blocks, around a ring if keys are sharded too.

    Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3.
    """
    if op.name not in RING:
        return None
    form: Form = op.params["form"]
    q, k, v = (_computed_spec(graph, value, constraints) for value in op.inputs[:3])
    used: set[str] = set()

    def take(axes: Sequence[str]) -> Axes:
        free = tuple(axis for axis in axes if axis not in used)
        used.update(free)
        return free

    batch = [take([axis for axis in q[dim] if axis in k[dim] and axis in v[dim]]) for dim in range(form.num_batch)]
    queries = take(q[form.queries])
    rows = [take(q[dim]) for dim in range(form.num_batch, form.queries)]
    is_ring = k[form.num_batch] == queries
    kernel: Kernel | None = op.params["kernel"]
    mesh = resolver.mesh
    if resolver.program.context == RING_CONTEXT:
        return AttentionSharding(form, (*batch, *rows, queries, queries if is_ring else ()))
    separate = [*batch, *rows]
    order = [*reversed(range(form.num_batch)), *range(form.num_batch, form.queries)]
    others = queries
    if others:  # of the fastest axis, so that one exchange leaves contiguous blocks to the others
        dims = [dim for dim in order if form.sizes[dim] % mesh.ways((*separate[dim], others[-1])) == 0]
        if dims:
            separate[dims[0]] = (*separate[dims[0]], others[-1])
            others = others[:-1]
    if kernel is None:
        return AttentionSharding(form, (*separate, others, others if is_ring else ()))
    unit = unit_of(kernel) * mesh.ways(others)
    by_queries, by_keys = (form.sizes[label] % unit == 0 for label in (form.queries, form.keys))
    keys = others if is_ring and by_queries and by_keys and kernel.has_blocks else ()
    is_exact = keys or (by_queries and kernel.pattern.is_full)
    return AttentionSharding(form, (*separate, others if is_exact else (), keys))


def unit_of(kernel: Kernel) -> int:
    """Returns the least queries or keys on a device of a ring: two parts of the sequence, each of whole blocks."""
    return 2 * (LANES if kernel.name == SPLASH else 1)


def attention_kernels(traced: StepAnalysis) -> list[Op]:
    """Returns the first operation of each group of equal attention kernels, forward."""
    return [op for op in traced.first_ops.get(FORWARD, ()) if op.params["kernel"] is not None]


def kernel_labels(traced: StepAnalysis) -> frozenset[Labels]:
    """Returns the labels of the values that fused attention reads and writes, also with stacked layers."""
    values = (value for op in traced.graph.ops() if op.name in RING for value in (*op.inputs, *op.outputs))
    return stacked_labels(traced.axes, {traced.axes.classes[value] for value in values}, traced.layer_labels)


def _computed_spec(graph: Graph, value: int, constraints: Sequence[Constraint | None]) -> Spec:
    constraint = constraints[value]
    return ((),) * len(graph.shape(value)) if constraint is None else constraint.computed
