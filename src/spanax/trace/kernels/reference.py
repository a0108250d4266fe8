"""Which dims of a kernel can be sharded, shown by its plain reference.

A class of dims can be sharded where every operation of the reference computes row i of its results from row i of its
operands, or sums over the class and passes the sum on linearly: each device then computes its rows, or its term of the
sum, from its shards. Along any other class the kernel needs whole operands.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.errors import first_line
from spanax.trace.analysis.op_groups import contraction_flops, trips
from spanax.trace.axes.discover import Dims, joined
from spanax.trace.jaxpr.dim_maps.relations import Dim, Kind, Relation
from spanax.trace.jaxpr.graph import CONTRACTIONS, HIGH_LEVEL, REMAT, Body, Graph, Op, difference, scan_counts
from spanax.trace.jaxpr.linear import PRODUCTS, linear_operands, zeros

Labels = tuple[int | None, ...]
"""The class of each dim of an array; None for a dim of size 1."""

SUMS = frozenset({"reduce_sum", "dot_general"})
"""Operations whose results over a contracted dim are sums of those of its parts."""


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
                yield Relation(Kind.GROUPS, dims, factor=ways.get(label, 1))
            elif label not in ways:
                yield Relation(Kind.REORDERED, dims)
            else:
                yield Relation(Kind.SAME if is_of_result else Kind.CONTRACTED, dims)

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
        self._zeros = zeros(graph)
        self._known: dict[int, int | None] = {}
        for value, known in zip(graph.body.inputs, labels or (), strict=labels is not None):
            self._known.update(
                (root, label) for root, label in zip(self._dims.classes(value), known, strict=True) if root is not None
            )

    def dims(self, trace: Callable[[Sequence[Any]], Graph]) -> KernelDims:
        """Returns how the dims of its inputs and outputs are related; `trace` traces it with other arguments."""
        body = self.graph.body
        arrays = [self._dims.classes(value) for value in (*body.inputs, *body.outputs)]
        roots = sorted({root for labels in arrays for root in labels if root is not None})
        numbers = {root: label for label, root in enumerate(roots)}
        ways: list[tuple[int, int]] = []
        whole: list[tuple[int, str]] = []
        sums: list[list[int]] = [[] for _ in body.outputs]
        for root, label in numbers.items():
            result = _Rows(self.graph, self._dims, root, self._zeros).of_outputs()
            if isinstance(result, str):
                whole.append((label, result))
                continue
            ways.append((label, self._dims.ways(root)))
            for index, is_sum in enumerate(result):
                sums[index] += [label] if is_sum else []
        labels = [tuple(None if root is None else numbers[root] for root in roots) for roots in arrays]
        count = len(body.inputs)
        operands = tuple(labels[:count])
        dims = KernelDims(operands, tuple(labels[count:]), tuple(map(tuple, sums)), tuple(ways), tuple(whole))
        avals = [self.graph.avals[value] for value in body.inputs]
        for label, _ in ways:
            if reason := _resized(trace, self.graph, doubled(dims, avals, label)):
                dims = dims.without([label], reason)
        return dims

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


class _NotByRows(Exception):
    """An operation needs all rows of a class."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """Follows the rows of one class of dims, `root`, through a reference; `zeros` are values that are always zero."""

    graph: Graph
    dims: Dims
    root: int
    zeros: frozenset[int]

    def of_outputs(self) -> list[bool] | str:
        """Returns whether each output without rows is a sum of terms of the rows; a reason if rows are not separate."""
        body = self.graph.body
        partial = set[int]()
        try:
            for value in body.inputs:
                self._check(value, "an argument")
            if not any(self._of(value) for value in body.inputs):
                raise _NotByRows("no argument has them")
            self._body(body, partial)
        except _NotByRows as error:
            return str(error)
        for index, value in enumerate(body.outputs):
            if value in self.graph.constants or (not self._of(value) and value not in partial):
                return f"result {index} does not depend on them"
        return [value in partial for value in body.outputs]

    def _of(self, value: int) -> list[int]:
        """Returns the dims of a value along the class."""
        return [dim for dim, root in enumerate(self.dims.classes(value)) if root == self.root]

    def _check(self, value: int, what: str) -> None:
        if len(self._of(value)) > 1:
            raise _NotByRows(f"{what} has two dims along them")

    def _body(self, body: Body, partial: set[int]) -> None:
        """Adds the values of a body that are sums of terms to `partial`.

        Raises:
          _NotByRows: an operation needs all rows.
        """
        for op in body.ops:
            what = f"`{op.name}` at {op.where}" if op.where else f"`{op.name}`"
            for value in (*op.inputs, *op.outputs):
                self._check(value, what)
            involved = [value for value in op.inputs if self._of(value) or value in partial]
            if any(value in self.graph.constants and self._of(value) for value in op.inputs):
                raise _NotByRows(f"{what} reads a constant along them")
            if op.bodies:
                self._call(op, what, partial, is_involved=bool(involved))
            elif any(self._of(value) for value in op.inputs):
                self._along(op, what, partial)
            elif involved:
                self._linear(op, what, partial)
            elif new := [dim for out, dim in self._ends(op) if (out, dim) not in op.dim_map.dims(Kind.REPEATED)]:
                raise _NotByRows(f"{what} numbers or draws them" if new else what)

    def _ends(self, op: Op) -> list[Dim]:
        """Returns the dims of the results along the class, by position among operands and results."""
        outs = enumerate(op.outputs, len(op.inputs))
        return [(index, dim) for index, value in outs for dim in self._of(value)]

    def _along(self, op: Op, what: str, partial: set[int]) -> None:
        """Follows an operation with an operand along the class."""
        if any(value in partial for value in op.inputs):
            raise _NotByRows(f"{what} uses a sum over them with its terms")
        ends = {*self._ends(op)}
        if ends & op.dim_map.dims(Kind.ALONG):
            raise _NotByRows(f"{what} works along them")
        starts = {(index, dim) for index, value in enumerate(op.inputs) for dim in self._of(value)}
        is_sum = False
        for relation in op.dim_map.relations:
            if not starts & {*relation.dims, *relation.other}:
                continue
            if relation.kind is Kind.CONTRACTED and op.name in SUMS and {*relation.dims} <= starts and not ends:
                is_sum = True
            elif relation.kind in (Kind.SAME, Kind.GROUPS):
                if len(ends & {*relation.dims}) != len(op.outputs):
                    raise _NotByRows(f"{what} combines them")
            elif relation.kind is not Kind.FACTORS or not {*relation.dims[1:], *relation.other[1:]}.isdisjoint(
                starts | ends
            ):
                raise _NotByRows(f"{what} combines them")
            starts -= {*relation.dims, *relation.other}
        if starts or not (is_sum or len(ends) == len(op.outputs)):
            raise _NotByRows(f"{what} combines them")
        partial.update(op.outputs if is_sum else ())

    def _linear(self, op: Op, what: str, partial: set[int]) -> None:
        """Follows an operation on sums over the class, which must be linear."""
        positions = [*linear_operands(op)]
        terms = [index for index, value in enumerate(op.inputs) if value in partial]
        is_product = op.name in PRODUCTS and len(terms) == 1
        known = {value for value in op.inputs if value in partial or value in self.zeros}
        is_joint = {*terms} <= {*positions} and all(op.inputs[index] in known for index in positions)
        is_inexact = all(jnp.issubdtype(self.graph.avals[value].dtype, jnp.inexact) for value in op.outputs)
        if not (is_product or (is_joint and op.name not in PRODUCTS)) or not is_inexact or self._ends(op):
            raise _NotByRows(f"{what} uses a sum over them before it is complete")
        partial.update(op.outputs)

    def _call(self, op: Op, what: str, partial: set[int], *, is_involved: bool) -> None:
        """Follows a loop, a branch or a remat."""
        wires = self.graph.wires(op)
        if is_involved and op.name not in (*REMAT, "scan", "cond", HIGH_LEVEL):
            raise _NotByRows(f"{what} combines them")
        for outer, inner in (*wires.inputs, *wires.outputs):
            if len(self._of(outer)) != len(self._of(inner)) and (op.name != "scan" or scan_counts(self.graph, op)[1]):
                raise _NotByRows(f"{what} iterates along them")
        partial.update(inner for outer, inner in wires.inputs if outer in partial)
        starts = {inner: outer for outer, inner in wires.inputs}
        # A carry that starts at zero may be a sum; one that starts as a sum is one.
        sums = {first for first, _ in wires.carried if starts[first] in self.zeros | partial}
        for known in ({first for first in sums if first in partial}, sums):
            inside = partial | known
            try:
                for body in op.bodies:
                    self._body(body, inside)
                if any((first in inside) != (last in inside) for first, last in wires.carried):
                    raise _NotByRows(f"{what} adds a sum over them to its carry")
                break
            except _NotByRows:
                if known == sums:
                    raise
        partial |= inside
        for outer, inner in wires.outputs:
            if inner in partial:
                partial.add(outer)
        for outer, inner in wires.outputs:  # all branches, or none
            if outer in partial and inner not in partial and inner not in self.zeros:
                raise _NotByRows(f"{what} uses a sum over them in one of its branches")


def _contractions(op: Op, runs: int) -> Iterator[tuple[Op, int]]:
    """Yields the matmuls and convolutions that an operation is or runs, with their numbers of runs."""
    if op.name in CONTRACTIONS:
        yield op, runs
    for body in op.bodies:
        for inner in body.ops:
            yield from _contractions(inner, runs * trips(op))


def _resized(trace: Callable[[Sequence[Any]], Graph], graph: Graph, avals: Sequence[Any]) -> str:
    """Returns how a reference differs where its operands have other sizes; empty if only its shapes do."""
    try:
        other = trace(avals)
    except Exception as error:  # of the user's function
        return f"it cannot be traced with twice as many: {first_line(error)}"
    if difference(graph.body, other.body):
        return "its operations depend on their number"
    for value, constant in graph.constants.items():
        if np.size(constant) == 1 and not isinstance(constant, jax.core.Tracer):
            if not np.array_equal(np.asarray(constant), np.asarray(other.constants[value])):
                return "it computes with their number, such as a mean over them"
    return ""


def doubled(dims: KernelDims, avals: Sequence[Any], label: int) -> list[Any]:
    """Returns the avals of operands with twice the rows of a class."""
    return [
        jax.ShapeDtypeStruct(
            [2 * size if each == label else size for size, each in zip(aval.shape, labels, strict=True)], aval.dtype
        )
        for aval, labels in zip(avals, dims.operands, strict=True)
    ]
