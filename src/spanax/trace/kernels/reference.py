"""Which dims of a kernel can be sharded, shown by its plain reference.

A class of dims can be sharded where every operation of the reference computes row i of its results from row i of its
operands, or sums over the class and passes the sum on linearly: each device then computes its rows, or its term of the
sum, from its shards. Along any other class the kernel needs whole operands.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from spanax.errors import first_line
from spanax.trace.analysis.op_groups import contraction_flops, trips
from spanax.trace.axes.discover import Dims, joined
from spanax.trace.jaxpr.dim_maps.relations import Kind as DimKind
from spanax.trace.jaxpr.dim_maps.relations import Relation
from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph, Op
from spanax.trace.rewrites.microbatches.flow import Flow, Misaligned, check_aligned, is_changed
from spanax.trace.rewrites.microbatches.rules import SAME, Dependence, Kind, rows

Labels = tuple[int | None, ...]
"""The class of each dim of an array; None for a dim of size 1."""


@dataclass(frozen=True)
class KernelDims:
    """How the dims of a kernel's operands and results are related.

    Attributes:
      operands: the classes of the dims of each operand.
      results: those of each result.
      sums: for each result, the classes of which every shard yields one term of a sum.
      ways: the classes that can be sharded, each with a number that the number of shards divides.
      whole: the other classes, each with the operation of the reference that needs all of it.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    sums: tuple[tuple[int, ...], ...]
    ways: tuple[tuple[int, int], ...]
    whole: tuple[tuple[int, str], ...]

    def relations(self, shapes: Sequence[Sequence[int]]) -> Iterator[Relation]:
        """Yields the relations of the dims of operands and results with these shapes."""
        arrays = (*self.operands, *self.results)
        ways = dict(self.ways)
        for label in sorted({label for labels in arrays for label in labels if label is not None}):
            dims = tuple((array, labels.index(label)) for array, labels in enumerate(arrays) if label in labels)
            is_of_result = any(array >= len(self.operands) for array, _ in dims)
            if len({shapes[array][dim] for array, dim in dims}) > 1:
                yield Relation(DimKind.GROUPS, dims, factor=ways.get(label, 1))
            elif label not in ways:
                yield Relation(DimKind.REORDERED, dims)
            else:
                yield Relation(DimKind.SAME if is_of_result else DimKind.CONTRACTED, dims)

    def without(self, lost: Collection[int], reason: str) -> "KernelDims":
        """Returns the dims where some classes cannot be sharded, for a reason."""
        return replace(
            self,
            sums=tuple(tuple(label for label in labels if label not in lost) for labels in self.sums),
            ways=tuple((label, count) for label, count in self.ways if label not in lost),
            whole=tuple(sorted((*self.whole, *((label, reason) for label in lost)))),
        )

    def batched(self, is_batched: Sequence[bool], size: int) -> "KernelDims":
        """Returns the dims under `jax.vmap`, with a new first dim of the batched operands and of all results."""
        label = 1 + max((label for labels in (*self.operands, *self.results) for label in labels if label), default=0)
        pairs = zip(self.operands, is_batched, strict=True)
        return replace(
            self,
            operands=tuple((label, *labels) if is_mapped else labels for labels, is_mapped in pairs),
            results=tuple((label, *labels) for labels in self.results),
            ways=(*self.ways, (label, size)),
        )


@dataclass(frozen=True)
class Product:
    """A matmul or convolution of a reference.

    Attributes:
      flops: its FLOPs.
      dtype: the dtype of its first operand.
      sizes: the sizes of its dims, each with its class: m, n, k and separate products.
      results: the results that need it.
    """

    flops: int
    dtype: str
    sizes: tuple[tuple[tuple[int, int | None], ...], ...]
    results: tuple[int, ...] = ()


class Reference:
    """The traced reference of a kernel, with the classes of its dims; `labels` are those of its inputs, if known."""

    def __init__(self, graph: Graph, labels: Sequence[Labels] | None = None):
        self.graph = graph
        self._dims: Dims = joined(graph, ())
        self._dims.join_turns(())
        self._dims.join_pieces()
        self._known: dict[int, int | None] = {}
        for value, known in zip(graph.body.inputs, labels or (), strict=labels is not None):
            self._known.update(
                (root, label) for root, label in zip(self._dims.classes(value), known, strict=True) if root is not None
            )

    def dims(self, trace: Callable[[Sequence[Any]], Graph]) -> KernelDims:
        """Returns how the dims of its inputs and outputs are related; `trace` traces it with other arguments."""
        body = self.graph.body
        arrays = [self._dims.classes(value) for value in (*body.inputs, *body.outputs)]
        roots = {root for each in arrays for root in each if root is not None}
        numbers = {root: label for label, root in enumerate(sorted(roots))}
        labels = [tuple(None if root is None else numbers[root] for root in each) for each in arrays]
        count = len(body.inputs)
        dims = KernelDims(tuple(labels[:count]), tuple(labels[count:]), ((),) * len(body.outputs), (), ())
        for root, label in numbers.items():
            dims = self._with_class(dims, label, self._dims.ways(root), trace)
        return dims

    def _with_class(
        self, dims: KernelDims, label: int, ways: int, trace: Callable[[Sequence[Any]], Graph]
    ) -> KernelDims:
        """Returns the dims with a class that can be sharded in `ways`, or that the kernel needs whole."""
        body = self.graph.body
        if any(labels.count(label) > 1 for labels in (*dims.operands, *dims.results)):
            return dims.without([label], "an array has two dims along them")
        if not any(label in labels for labels in dims.operands):
            return dims.without([label], "no argument has them")
        try:
            full = trace(doubled(dims, [self.graph.avals[value] for value in body.inputs], label))
        except Exception as error:  # of the user's function
            return dims.without([label], f"it cannot be traced with twice as many: {first_line(error)}")

        def expected(value: int, labels: Labels) -> Dependence:
            dim = labels.index(label)
            return rows(dim, self.graph.shape(value)[dim] // ways)

        pairs = zip(body.inputs, dims.operands, strict=True)
        found = _by_rows(full, self.graph, [expected(*pair) if label in pair[1] else SAME for pair in pairs], 2 * ways)
        if isinstance(found, str):
            return dims.without([label], found)
        sums = [
            (*each, label) if out.kind is Kind.PARTIAL else each for each, out in zip(dims.sums, found, strict=True)
        ]
        for value, labels, out in zip(body.outputs, dims.results, found, strict=True):
            each = expected(value, labels) if label in labels else SAME
            if out.kind is Kind.ROWS and (out.dim != each.dim or out.inner not in (each.inner, None)):
                return dims.without([label], "a result has their rows in another order")
        return replace(dims, sums=tuple(sums), ways=(*dims.ways, (label, ways)))

    def products(self) -> tuple[Product, ...]:
        """Returns its matmuls and convolutions; those of a loop are repeated."""
        body = self.graph.body
        needed = [{*self.graph.slice([value])} for value in body.outputs]
        return tuple(
            self._product(each, runs, tuple(index for index, ops in enumerate(needed) if op in ops))
            for op in body.ops
            for each, runs in _contractions(op, 1)
        )

    def _product(self, op: Op, runs: int, results: tuple[int, ...]) -> Product:
        summed, passed = op.dim_map.contraction
        groups: list[list[tuple[int, int | None]]] = [[], [], [], [(runs, None)] if runs > 1 else []]
        for lhs, rhs, out in passed:
            group = 3 if lhs >= 0 and rhs >= 0 else int(lhs < 0)
            groups[group].append(self._sized(op.outputs[0], out))
        groups[2] = [self._sized(op.inputs[0], lhs) for lhs, _ in summed]
        dtype = str(self.graph.avals[op.inputs[0]].dtype)
        return Product(runs * contraction_flops(self.graph, op), dtype, tuple(map(tuple, groups)), results)

    def _sized(self, value: int, dim: int) -> tuple[int, int | None]:
        root = self._dims.classes(value)[dim]
        return self.graph.shape(value)[dim], None if root is None else self._known.get(root)


def _by_rows(full: Graph, small: Graph, inputs: Sequence[Dependence], ways: int) -> list[Dependence] | str:
    """Returns how results depend on the rows of a class; a reason if they cannot be computed of some of its rows.

    Args:
      full: a reference, with twice the rows.
      small: the reference.
      inputs: how its operands depend on the rows.
      ways: their number in `full`.
    """
    try:
        check_aligned(full, small)
    except Misaligned:
        return "its operations depend on their number"
    outs = Flow(full, small, ways).run(inputs)
    for index, out in enumerate(outs):
        if out.kind is Kind.SAME:
            return f"result {index} does not depend on them"
        if out.kind not in (Kind.ROWS, Kind.PARTIAL):
            op = out.cause
            return (
                "it reads numbers or a constant of them"
                if op is None
                else f"`{op.name}` at {op.where} needs all of them"
            )
    if is_changed(full, small, full.body, small.body):
        return "it draws numbers for them, or computes with their number, such as a mean over them"
    return outs


def _contractions(op: Op, runs: int) -> Iterator[tuple[Op, int]]:
    """Yields the matmuls and convolutions that an operation is or runs, with their numbers of runs."""
    if op.name in CONTRACTIONS:
        yield op, runs
    for body in op.bodies:
        for inner in body.ops:
            yield from _contractions(inner, runs * trips(op))


def doubled(dims: KernelDims, avals: Sequence[Any], label: int) -> list[Any]:
    """Returns the avals of operands with twice the rows of a class."""
    return [
        jax.ShapeDtypeStruct(
            [2 * size if each == label else size for size, each in zip(aval.shape, labels, strict=True)], aval.dtype
        )
        for aval, labels in zip(avals, dims.operands, strict=True)
    ]
