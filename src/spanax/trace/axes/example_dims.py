"""Decides which dim of each array of a batch has the examples, from how the program uses the dims.

Dim 0 has them unless the program shows otherwise. A dim along which a loop with a carry iterates, or of which an index
selects one element at a time, counts steps; the batch is along the next dim whose class divides the matmuls.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spanax.batch_dims import ExampleDims, most_common
from spanax.trace.axes.discover import Dims
from spanax.trace.jaxpr.dim_maps.relations import Dim, Family, Kind
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op, scan_counts
from spanax.trace.jaxpr.provenance import reachable
from spanax.trace.variables import Leaf

LEAST_SHARE = 0.5
"""A class of examples divides this share of the matmuls that the class dividing the most of them divides."""


def example_dims(dims: Dims, leaves: Sequence[Leaf], batch: Sequence[Leaf]) -> ExampleDims:
    """Returns the dim with the examples of each array of a batch.

    Args:
      dims: the classes of the dims, joined by all operations.
      leaves: the state's arrays; they are the graph's first inputs.
      batch: the batch's arrays; the inputs after them.
    """
    use = _Use.of(dims, leaves, batch)
    candidates = [use.candidate(value) for value in use.values]
    inner = use.inner(candidates)
    updated = use.updated(len(leaves))
    chosen = [(value, dim) for value, dim in zip(use.values, candidates, strict=True) if dim is not None]
    if not chosen:
        return most_common([leaf.shape for leaf in batch])
    sizes = Counter(dims.size(*dim) for dim in chosen)

    def evidence(dim: tuple[int, int]) -> tuple[bool, bool, int, int]:
        label = dims.find(*dim)
        size = dims.size(*dim)
        return label not in inner, label not in updated, sizes[size], size

    first = max(chosen, key=evidence)
    label = dims.find(*first)
    size = dims.size(*first)

    def of(value: int, candidate: int | None) -> int | None:
        same = [dim for dim in range(len(dims.shape(value))) if dims.find(value, dim) == label]
        if same:
            return candidate if candidate in same else same[0]
        # An array that no operation relates to the others, such as the ids of the examples.
        dim = use.first(value) if candidate is None else candidate
        is_related = dim is not None and (inner | updated).isdisjoint({dims.find(value, dim)})
        return dim if dim is not None and is_related and dims.size(value, dim) == size else None

    return tuple(of(value, candidate) for value, candidate in zip(use.values, candidates, strict=True))


def contraction_size(graph: Graph, op: Op) -> int:
    """Returns about the multiply-adds of a contraction."""
    shapes = [graph.shape(value) for value in (*op.inputs[:2], *op.outputs)]
    # The root of the product of operand and result sizes has the units of multiply-adds for any contraction.
    return round(math.prod(math.prod(shape) for shape in shapes) ** 0.5)


@dataclass(frozen=True, eq=False)
class _Use:
    """How a program uses the dims of its batch.

    Attributes:
      dims: the classes.
      values: the arrays of the batch.
      of_params: the classes of parameters.
      consumed: the classes that count the steps of a loop.
      work: the multiply-adds that each class divides.
      least: the multiply-adds that a class of examples divides at least.
    """

    dims: Dims
    values: Sequence[int]
    of_params: frozenset[int]
    consumed: frozenset[int]
    work: dict[int, int]
    least: float

    @staticmethod
    def of(dims: Dims, leaves: Sequence[Leaf], batch: Sequence[Leaf]) -> "_Use":
        """Returns the use of the dims of a batch."""
        inputs = dims.graph.body.inputs
        values = inputs[len(leaves) :]
        params = [value for value, leaf in zip(inputs, leaves, strict=False) if leaf.kind == "param"]
        of_params = frozenset(label for value in params for label in dims.classes(value) if label is not None)
        consumed = frozenset(dims.with_factors({dims.find(*dim) for dim in consumed_dims(dims.graph)}))
        use = _Use(dims, values, of_params, consumed, _work(dims), 0)
        most = max((use.divided(value, dim) for value in values for dim in range(len(dims.shape(value)))), default=0)
        return _Use(dims, values, of_params, consumed, use.work, most * LEAST_SHARE)

    def divided(self, value: int, dim: int) -> int:
        """Returns the multiply-adds that a dim divides as examples; inner dims of weights are not examples."""
        label = self.dims.find(value, dim)
        return 0 if dim and label in self.of_params else self.work.get(label, 0)

    def candidate(self, value: int) -> int | None:
        """Returns the first dim that a loop does not consume and that divides work; if none, one that divides work."""
        shape = self.dims.shape(value)
        first = self.first(value)
        if first == 0 and shape[0] == 1:
            return 0
        dims = [dim for dim, size in enumerate(shape) if size > 1 and not self.is_idle(value, dim)]
        loose = [dim for dim in dims if self.dims.find(value, dim) not in self.consumed]
        return next(iter(loose or dims), None)

    def is_idle(self, value: int, dim: int) -> bool:
        """Returns whether a dim divides little of the work."""
        divided = self.divided(value, dim)
        return divided == 0 or divided < self.least

    def first(self, value: int) -> int | None:
        """Returns the first dim that a loop does not consume."""
        dims = range(len(self.dims.shape(value)))
        return next((dim for dim in dims if self.dims.find(value, dim) not in self.consumed), None)

    def inner(self, candidates: Sequence[int | None]) -> set[int]:
        """Returns the classes of dims after the example dim of an array with another class, such as features."""
        labels = set[int]()
        for value, candidate in zip(self.values, candidates, strict=True):
            first = candidate or 0
            same = {self.dims.find(value, candidate)} if candidate is not None else set[int]()
            labels |= {self.dims.find(value, dim) for dim in range(first + 1, len(self.dims.shape(value)))} - same
        return labels

    def updated(self, num_leaves: int) -> set[int]:
        """Returns the classes of arrays that the program replaces, such as parameters that are passed as arrays."""
        results = {self.dims.classes(value) for value in self.dims.graph.body.outputs[num_leaves:]}
        replaced = (self.dims.classes(value) for value in self.values if self.dims.classes(value) in results)
        return {label for labels in replaced for label in labels if label is not None}


def _work(dims: Dims) -> dict[int, int]:
    """Returns the multiply-adds that each class divides, directly or as selections and parts along it."""
    direct = Counter[int]()
    for op, runs in runs_of(dims.graph.body, 1):
        if op.name in CONTRACTIONS:
            size = runs * contraction_size(dims.graph, op)
            for label in {label for value in (*op.inputs, *op.outputs) for label in dims.classes(value)} - {None}:
                direct[label] += size  # type: ignore[index]
    links = dims.links()
    work = dict[int, int](direct)
    for label in links:
        work[label] = max(direct[other] for other in reachable(label, links))
    return work


def runs_of(body: Body, runs: int) -> Iterator[tuple[Op, int]]:
    """Yields each operation with its number of runs; loops of unknown length run once."""
    for op in body.ops:
        yield op, runs
        for inner in op.bodies:
            yield from runs_of(inner, runs * op.params.get("length", 1) if op.name == "scan" else runs)


def consumed_dims(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yields the dims along which loops with a carry iterate, or of which a loop selects one element at a time.

    A loop of Python selects every element by an index of its own.
    """
    for value, readers in graph.readers.items():
        slices = [op.params for op in readers if op.name == "slice"]
        for dim, size in enumerate(graph.shape(value)) if len(slices) > 1 else ():
            ends = [(params["start_indices"][dim], params["limit_indices"][dim]) for params in slices]
            if {start for start, stop in ends if stop - start == 1} == {*range(size)} and size > 1:
                yield value, dim
        yield from ((value, op.params["axis"]) for op in readers if op.name == "unstack")
    for op in graph.ops():
        if op.name == "scan" and scan_counts(graph, op)[1]:
            num_before = sum(scan_counts(graph, op))
            yield from ((value, 0) for value in op.inputs[num_before:])
        if op.name in ("scan", "while"):
            yield from (dim for body in op.bodies for inner, _ in runs_of(body, 1) for dim in _selected(graph, inner))


def _selected(graph: Graph, op: Op) -> Iterator[tuple[int, int]]:
    """Yields the dims of which an operation selects one element by an index."""
    if op.family is Family.DYNAMIC_SLICE:
        pairs = zip(graph.shape(op.inputs[0]), graph.shape(op.outputs[0]), strict=True)
        yield from ((op.inputs[0], dim) for dim, sizes in enumerate(pairs) if sizes[1] == 1 < sizes[0])
    elif op.family is Family.GATHER and math.prod(graph.shape(op.inputs[1])[:-1]) == 1:
        sizes = op.params["slice_sizes"]
        indexed = op.params["dimension_numbers"].start_index_map
        yield from ((op.inputs[0], dim) for dim in indexed if sizes[dim] == 1 < graph.shape(op.inputs[0])[dim])


def scanned_dims(graph: Graph) -> set[Dim]:
    """Returns the dims of scanned operands and stacked results, also through transposes and elementwise ops.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> def parts(x):
      ...     return jax.lax.scan(lambda total, part: (total + part.sum(), None), 0.0, jnp.exp(x).reshape(4, 2))[0]
      >>> graph = from_jaxpr(jax.make_jaxpr(parts)(jax.ShapeDtypeStruct((8,), "float32")))
      >>> reshapes = [op.outputs[0] for op in graph.body.ops if op.name == "reshape"]
      >>> scanned_dims(graph) == {(reshapes[0], 0)}
      True
    """
    operands = list[Dim]()
    results = list[Dim]()
    for op in graph.ops():
        if op.name == "scan":
            operands += [(value, 0) for value in op.inputs[sum(scan_counts(graph, op)) :]]
            results += [(value, 0) for value in op.outputs[scan_counts(graph, op)[1] :]]
    producers = {value: [op] for value, op in graph.producers.items()}
    return _followed(graph, operands, producers, is_back=True) | _followed(graph, results, graph.readers, is_back=False)


def _followed(graph: Graph, stack: list[Dim], ops: Mapping[int, Sequence[Op]], *, is_back: bool) -> set[Dim]:
    """Returns dims, and those of other values whose rows are the same, transposed or computed elementwise."""
    followed = set[Dim]()
    while stack:
        value, dim = entry = stack.pop()
        if entry not in followed:
            followed.add(entry)
            for op in ops.get(value, ()):
                related = _same_dims(graph, op, value, dim)
                stack += [entry for entry in related if entry[0] in (op.inputs if is_back else op.outputs)]
    return followed


def _same_dims(graph: Graph, op: Op, value: int, dim: int) -> Iterator[Dim]:
    """Yields the dims of other values whose rows are those of a value, transposed or computed elementwise."""
    values = (*op.inputs, *op.outputs)
    if op.is_elementwise or op.family is Family.VIEW:
        for relation in op.dim_map.of_kind(Kind.SAME):
            dims = [(values[array], dim) for array, dim in relation.dims]
            same_size = ((v, d) for v, d in dims if math.prod(graph.shape(v)) == math.prod(graph.shape(value)))
            yield from same_size if (value, dim) in dims else ()
