"""Rows sorted by expert, which every device may sort for its own tokens.

Between the sort and the operations that put rows back, all rows are computed row by row, or by ragged matmuls whose
groups are the numbers of rows of each expert. Nothing depends on the order of rows then: each device may sort the rows
of its own tokens. What only looks like this has rows that are gathered: a shard of them has any number of groups, and
the partitioner replicates them for every ragged matmul.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from spanax.trace.jaxpr.counted import RENAMED, Choices, choices_of, count_keys, counts_of
from spanax.trace.jaxpr.dim_maps.relations import Family, Kind
from spanax.trace.jaxpr.graph import RAGGED, Graph, Op
from spanax.trace.jaxpr.index_arrays import IndexArrays, indices, repeated
from spanax.trace.jaxpr.provenance import reachable

Dim = tuple[int, int]
"""A value, and one of its dims."""

SUMMED = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
"""Reductions that do not depend on the order of their terms."""


@dataclass(frozen=True)
class RowOp:
    """An operation that each device computes for its own rows.

    Attributes:
      rows: a sorted dim, which is sharded as the dims below.
      inputs: for each operand, the dim of its rows, or of the tokens or choices that rows are taken from; None: whole.
      outputs: the same for each result; None: the sum over all rows.
      column: the column of the indices that is a row of a table; None without indices.
      counts: the position of the operand with the sizes of the groups; None without.
      sizes: of a lookup of tokens, or of choices, the numbers of rows, of tokens, and of elements of each; else 0.
      is_whole: whether it takes whole rows, by one index for each.
      beyond: of a sort by expert, what each operand has in place of a row of another device; None: anything. The first
        is the number of experts.
    """

    rows: Dim
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    column: int | None = None
    counts: int | None = None
    beyond: tuple[int | None, ...] = ()
    sizes: tuple[int, int, int] = (0, 0, 0)
    is_whole: bool = False

    def is_sent(self, ways: Any) -> Any:
        """Returns whether `ways` devices with different experts send less if they send rows than if they gather tokens.

        Each of them needs the rows of its own experts, and sends the places of these to all others.
        """
        rows, tokens, size = self.sizes
        return self.is_whole & (rows * (size + ways) < ways * tokens * size)


@dataclass(frozen=True, eq=False)
class SortedRows:
    """The rows of a program that each device may sort for itself.

    Attributes:
      dims: the dims of sorted rows, and of the places where the rows of choices are.
      ops: the operations that each device computes for its own rows.
      counts: the numbers of rows of each expert, where they are the sizes of groups, each with the sorted dim.
      added: those that an operation computes, and of which anything else needs the numbers over all devices.
      groups: the dims of experts of the weights in ragged matmuls.
      varying: the values that differ between devices with the same tokens and other experts.
      weights: the elements of experts that move if these are gathered.
      can_stay: whether each device can compute its experts for the tokens of others.
      choices: the number of experts, and of different ones that each token chooses; (0, 0) where sorts differ in it.
      ragged: the dims of all rows of ragged matmuls, of what is computed between them, and of its indices.
    """

    dims: frozenset[Dim] = frozenset()
    ops: Mapping[Op, RowOp] = field(default_factory=dict)
    counts: Mapping[int, Dim] = field(default_factory=dict)
    added: frozenset[int] = frozenset()
    groups: tuple[Dim, ...] = ()
    varying: frozenset[int] = frozenset()
    weights: int = 0
    can_stay: bool = False
    choices: tuple[int, int] = (0, 0)
    ragged: frozenset[Dim] = frozenset()

    def tokens(self, ways: Any) -> Any:
        """Returns the elements of tokens that move if experts stay on `ways` devices, and of the places of rows."""
        moved = np.zeros_like(ways, float)
        for op in self.ops.values():
            rows, tokens, size = op.sizes
            moved += np.where(op.is_sent(ways), rows * (size / ways + 1), tokens * size)
        return moved

    def share(self, ways: Any) -> Any:
        """Returns the largest share of rows that may belong to the experts of one of `ways` devices.

        Each token has at most one row for each of these experts.
        """
        number, each = self.choices
        return np.minimum(each, number // ways) / each if each else np.ones_like(ways, float)


class _OrderMatters(Exception):
    """An operation depends on the order of rows, or cannot be shown not to."""


def sorted_rows(graph: Graph) -> SortedRows:
    """Returns the rows that each device may sort for itself, and those of other ragged matmuls."""
    matmuls = [op for op in graph.ops() if op.name == RAGGED]
    if not matmuls:
        return SortedRows()
    sorts = [op for op in graph.ops() if _sorts_integers(graph, op)]
    arrays = IndexArrays(graph)
    neighbors, uniform = _neighbors(graph)
    touching = defaultdict[Dim, list[Op]](list)
    for op in graph.ops():
        for value in {*op.inputs, *op.outputs}:
            for dim in range(len(graph.shape(value))):
                touching[value, dim].append(op)
    dims = set[Dim]()
    ops = dict[Op, RowOp]()
    counts = dict[int, Dim]()
    added = set[int]()
    regions = list[_Region]()
    for sort in sorts:
        rows = frozenset[Dim]().union(*(reachable((value, 0), neighbors) for value in sort.outputs))
        if (sort.outputs[0], 0) in dims or sort in ops:
            continue
        ordered = dict.fromkeys(op for dim in rows for op in touching[dim])
        region = _Region(
            arrays, rows, uniform, (sort.outputs[0], 0), [op for op in sorts if (op.outputs[0], 0) in rows]
        )
        try:
            region.check(sorted(ordered, key=graph.positions.__getitem__))
        except _OrderMatters:
            continue
        dims |= rows | {(value, 0) for op in region.ops if op.name == "sort" for value in op.outputs}
        ops |= region.ops
        counts |= region.counts
        added |= {value for value, chain in region.chains.items() if region.is_read(frozenset(chain))}
        regions.append(region)
    choices = {region.choices for region in regions}
    return SortedRows(
        frozenset(dims),
        ops,
        counts,
        frozenset(added),
        tuple((op.inputs[1], dim) for op in ops if op.name == RAGGED for dim in _group_dims(op)),
        frozenset(value for value, _ in dims).union(*(region.places for region in regions)),
        sum(region.weights for region in regions),
        all(region.can_stay for region in regions),
        next(iter(choices)) if len(choices) == 1 else (0, 0),
        _rows_of(graph, matmuls),
    )


def _rows_of(graph: Graph, matmuls: Sequence[Op]) -> frozenset[Dim]:
    """Returns the dims of rows that ragged matmuls multiply; rows of the batch are not sorted, and stay sharded."""
    result = frozenset[Dim]()
    neighbors, _ = _neighbors(graph, without=RAGGED)
    inputs = {*graph.body.inputs}
    for op in matmuls:
        values = (*op.inputs, *op.outputs)
        rows = {(0, dim) for dim in op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions}
        related = [relation.dims for relation in op.dim_map.relations if not rows.isdisjoint(relation.dims)]
        for array, dim in {each for dims in related for each in dims}:
            found = reachable((values[array], dim), neighbors)
            if inputs.isdisjoint(value for value, _ in found):
                result |= found
    return result


def _group_dims(op: Op) -> Sequence[int]:
    dims: Sequence[int] = op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    return dims


def _sorts_integers(graph: Graph, op: Op) -> bool:
    """Returns whether an operation sorts one dim of choices, by one key of integers."""
    if op.name != "sort" or op.params["num_keys"] != 1 or len(graph.shape(op.inputs[0])) != 1:
        return False
    return bool(jnp.issubdtype(graph.avals[op.inputs[0]].dtype, jnp.integer))


def _neighbors(graph: Graph, without: str = "") -> tuple[Mapping[Dim, Collection[Dim]], frozenset[Dim]]:
    """Returns the dims with the same rows, also outside and inside of loops, and those whose rows are all equal.

    What a sort or a cumulative sum works along has other rows before than after. Equal rows have no order. Those
    of the name `without` relate none.
    """
    uniform = set[Dim]()
    groups = list[list[Dim]]()
    for op in (op for op in graph.ops() if op.name != without):
        if op.bodies:
            groups += _across_bodies(graph, op)
            continue
        values = (*op.inputs, *op.outputs)
        along = op.dim_map.dims(Kind.ALONG) if op.family is Family.CUMULATIVE else set()
        groups += [
            [(values[array], dim) for array, dim in relation.dims]
            for relation in op.dim_map.of_kind(Kind.SAME)
            if along.isdisjoint(relation.dims)
        ]
        uniform |= {(values[array], dim) for array, dim in op.dim_map.dims(Kind.REPEATED)}
        if op.is_elementwise:
            uniform |= {
                (op.outputs[0], dim)
                for dim in range(len(graph.shape(op.outputs[0])))
                if all(not graph.shape(value) or (value, dim) in uniform for value in op.inputs)
            }
    result = defaultdict[Dim, list[Dim]](list)
    for group in groups:
        kept = [dim for dim in group if dim not in uniform]
        for dim in kept:
            result[dim] += kept
    return result, frozenset(uniform)


def _across_bodies(graph: Graph, op: Op) -> Iterator[list[Dim]]:
    """Yields dims with the same rows outside and inside of a loop, a branch or a remat, and in the next iteration.

    A value that a scan stacks has one dim more outside.
    """
    for outer, inner in graph.wires(op).pairs:
        rank = len(graph.shape(inner))
        extra = len(graph.shape(outer)) - rank
        yield from ([(outer, extra + dim), (inner, dim)] for dim in range(rank))


class _Region:
    """The operations on the rows of some sorts, checked one by one."""

    def __init__(
        self, arrays: IndexArrays, rows: frozenset[Dim], uniform: frozenset[Dim], first: Dim, sorts: Sequence[Op]
    ):
        self._arrays = arrays
        self._graph = arrays.graph
        self._rows = rows
        self._uniform = uniform
        self._first = first
        self._sorts = sorts
        (self._num_rows,) = self._graph.shape(first[0])
        self._slots = dict[int, np.ndarray]()  # what a sort takes along, by its choice
        self._places = dict[int, np.ndarray]()  # where the row of each choice is
        self._beyond = dict[int, np.ndarray]()  # what stands for rows and places of other devices
        self._choices: Choices | None = None
        self._num_experts = 0
        self.places = set[int]()
        self.weights = 0
        self.can_stay = True
        self.ops: dict[Op, RowOp] = {}
        self.counts: dict[int, Dim] = {}
        self.chains = defaultdict[int, set[int]](set)  # the counts that an operation computes, on their way to matmuls

    def check(self, ops: Sequence[Op]) -> None:
        """Checks all operations on rows, in order.

        Raises:
          _OrderMatters: the result of one depends on the order of rows.
        """
        self._keys = self._sorts[0].inputs[0]
        self._choices = choices_of(self._arrays, self._keys)
        self._need(self._choices is not None)
        assert self._choices is not None
        self._num_experts = self._choices.number
        for sort in self._sorts:
            self._add_sort(sort)
        for op in ops:
            if op in self._sorts:
                continue
            if op.bodies:
                self._check_wires(op)
            elif op.name == RAGGED:
                self._add_ragged(op)
            elif op.name == "sort":
                self._add_inverse(op)
            elif op.family in (Family.GATHER, Family.SCATTER_ADD) or op.name == "scatter":
                self._add_lookup(op)
            else:
                self._check_rows(op)
        self._check_places()
        self._need(all((value, dim) not in self._rows for value, dim in self._shown()))

    @property
    def choices(self) -> tuple[int, int]:
        """The number of experts, and of those that each token chooses."""
        return (0, 0) if self._choices is None else (self._choices.number, self._choices.each)

    def is_read(self, counts: frozenset[int]) -> bool:
        """Returns whether anything but the sizes of groups reads counts."""
        graph = self._graph
        pairs = {
            pair for value in counts for op in graph.readers[value] if op.bodies for pair in graph.wires(op).inputs
        }
        return (
            not counts.isdisjoint(graph.body.outputs)
            or any(outer in counts and inner not in counts for outer, inner in pairs)
            or any(
                not (op.bodies or op.name == RAGGED or counts.issuperset(op.outputs))
                for value in counts
                for op in graph.readers[value]
            )
        )

    def _shown(self) -> Iterator[Dim]:
        """Yields the dims of what the program takes and returns."""
        body = self._graph.body
        return ((value, dim) for value in (*body.inputs, *body.outputs) for dim in range(len(self._graph.shape(value))))

    def _need(self, condition: object) -> None:
        if not condition:
            raise _OrderMatters

    def _of(self, op: Op) -> set[tuple[int, int]]:
        """Returns the dims of rows of an operation, by the position of the operand or result."""
        values = (*op.inputs, *op.outputs)
        shape = self._graph.shape
        return {(i, dim) for i, v in enumerate(values) for dim in range(len(shape(v))) if (v, dim) in self._rows}

    def _add_sort(self, sort: Op) -> None:
        self._need(sort.inputs[0] == self._keys or self._arrays.are_equal(sort.inputs[0], self._keys))
        self._need(all((value, 0) not in self._rows for value in sort.inputs))
        self._need(all(len(self._graph.shape(value)) == 1 for value in sort.inputs))
        beyond = list[int | None]([self._num_experts])
        self._beyond[sort.outputs[0]] = repeated(self._num_experts, self._num_rows)
        for before, after in zip(sort.inputs[1:], sort.outputs[1:], strict=True):
            elements = self._arrays.elements(before, {})
            beyond.append(None if elements is None else int(elements.max()) + 1)
            if elements is not None:
                self._slots[after] = elements
                self._beyond[after] = repeated(int(elements.max()) + 1, self._num_rows)
        whole = (0,) * len(sort.inputs)
        self.ops[sort] = RowOp(self._first, whole, whole, beyond=tuple(beyond))

    def _check_wires(self, op: Op) -> None:
        """Checks that no loop iterates along rows."""
        wires = self._graph.wires(op)
        for outer, inner in (*wires.inputs, *wires.outputs):
            extra = len(self._graph.shape(outer)) - len(self._graph.shape(inner))
            self._need(all((outer, dim) not in self._rows for dim in range(extra)))

    def _check_rows(self, op: Op) -> None:
        """Checks that an operation computes row by row, or sums over rows."""
        summed = op.name in SUMMED or op.name == "dot_general"
        along = op.dim_map.dims(Kind.ALONG)
        for dim in self._of(op):
            relations = [relation for relation in op.dim_map.relations if dim in (*relation.dims, *relation.other)]
            self._need(relations and dim not in along)
            for relation in relations:
                is_sum = summed and relation.kind is Kind.CONTRACTED
                self._need(relation.kind is Kind.SAME or (is_sum and self._are_rows(op, relation.dims)))
                self.can_stay &= not is_sum  # it would sum what stands for rows of other devices, too

    def _are_rows(self, op: Op, dims: Sequence[tuple[int, int]]) -> bool:
        values = (*op.inputs, *op.outputs)
        return all({(values[array], dim)} & (self._rows | self._uniform) for array, dim in dims)

    def _add_ragged(self, op: Op) -> None:
        """Checks that the groups of a ragged matmul are the rows of each expert."""
        numbers = op.params["ragged_dot_dimension_numbers"]
        (summed, _), batch = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        shape = self._graph.shape
        self._need(not any(batch) and len(shape(op.inputs[0])) == 2 and len(shape(op.inputs[2])) == 1)
        if ragged in summed:
            expected = {(0, ragged), (1, numbers.dot_dimension_numbers[0][1][summed.index(ragged)])}
        else:
            expected = {(0, ragged), (len(op.inputs), 0)}
        self._need(self._of(op) == expected)
        self._add_counts(op.inputs[2])
        dims = dict(expected)
        self.can_stay &= shape(op.inputs[2]) == (self._num_experts,)
        self.weights += int(np.prod(shape(op.outputs[0] if ragged in summed else op.inputs[1])))
        inputs = tuple(dims.get(index) for index in range(len(op.inputs)))
        self.ops[op] = RowOp(self._first, inputs, (dims.get(len(op.inputs)),), counts=2)

    def _add_lookup(self, op: Op) -> None:
        """Checks a lookup by sorted indices, or its gradient, or one of rows by where they are.

        Each device has the rows of the table that its own indices name if they are a function of its own choices. Any
        other lookup, such as one by expert, has the same results in any order of its indices, and needs the whole
        table.
        """
        table, indices = op.inputs[:2]
        is_read = op.family is Family.GATHER
        others = len(op.inputs) if is_read else 2  # the position of the values looked up, or to add
        rows = self._of(op)
        numbers = op.params["dimension_numbers"]
        is_by_row = (1, 0) in rows
        in_table = {dim for array, dim in rows if array == 0 or (array == len(op.inputs) and not is_read)}
        windows = numbers.offset_dims if is_read else numbers.update_window_dims
        rank = len(self._graph.shape(op.outputs[0] if is_read else op.inputs[2]))
        first = next((each for each in range(rank) if each not in windows), rank)
        self._need(first < rank)
        self._need(not is_by_row or (others, first) in rows)
        column = self._aligned(op, self._slots if is_by_row else self._places)
        if column is None:
            self._need(is_by_row and not in_table and op.family is not Family.SCATTER)
            self._need(rows == {(1, 0), (others, first)})
            if is_read:
                self.ops[op] = RowOp(self._first, (None, 0), (first,))
            elif self._arrays.are_all(table, 0):
                self.ops[op] = RowOp(self._first, (None, 0, first), (None,))
            self.can_stay &= is_read or (op in self.ops and self._is_dropped(op, 0))
            return
        indexed = numbers.start_index_map if is_read else numbers.scatter_dims_to_operand_dims
        dim = indexed[column]
        self._need(in_table == (set() if is_by_row else {dim}))
        inputs = (dim, 0) if is_read else (dim, 0, first)
        self.can_stay &= self._is_dropped(op, column) and (op.name != "scatter" or self._arrays.are_all(table, 0))
        whole = self._graph.shape(table)
        sizes = self._num_rows, whole[dim] if is_by_row else self._num_rows, math.prod(whole) // whole[dim]
        looked_up = self._graph.shape(op.outputs[0] if is_read else op.inputs[2])
        number = len(self._graph.shape(indices)) - 1
        is_whole = looked_up == (*self._graph.shape(indices)[:-1], *whole[1:]) and dim == 0
        is_whole &= (*windows,) == (*range(number, rank),) and self._graph.shape(indices)[-1] == 1
        outputs = (first,) if is_read else (dim,)
        self.ops[op] = RowOp(self._first, inputs, outputs, column, sizes=sizes, is_whole=is_whole)

    def _is_dropped(self, op: Op, column: int) -> bool:
        """Returns whether what stands for rows of other devices is beyond the table of a lookup."""
        numbers = op.params["dimension_numbers"]
        is_read = op.family is Family.GATHER
        dim = (numbers.start_index_map if is_read else numbers.scatter_dims_to_operand_dims)[column]
        elements = self._arrays.elements(op.inputs[1], self._beyond)
        return elements is not None and bool(np.all(elements[..., column] >= self._graph.shape(op.inputs[0])[dim]))

    def _aligned(self, op: Op, known: Mapping[int, np.ndarray]) -> int | None:
        """Returns the column of the indices of a lookup that names, for each choice, its own row of the table."""
        numbers = op.params["dimension_numbers"]
        is_read = op.family is Family.GATHER
        indexed = numbers.start_index_map if is_read else numbers.scatter_dims_to_operand_dims
        batching = numbers.operand_batching_dims
        shape = self._graph.shape(op.inputs[1])
        elements = None if batching or not known else self._arrays.elements(op.inputs[1], known)
        if elements is None or self._num_rows % shape[0] or elements[..., 0].size != self._num_rows:
            return None
        for column, dim in enumerate(indexed):
            size = self._graph.shape(op.inputs[0])[dim]
            expected = indices(self._num_rows, size)
            is_row = op.params["slice_sizes"][dim] == 1 if is_read else dim in numbers.inserted_window_dims
            if is_row and self._num_rows % size == 0 and np.array_equal(elements[..., column].ravel(), expected):
                return column
        return None

    def _add_inverse(self, op: Op) -> None:
        """Adds a sort that finds the place of the row of each choice: the inverse permutation."""
        self._need(op.params["num_keys"] == 1 and len(op.inputs) == 2)
        self._need(self._of(op) == {(0, 0)} and len(self._graph.shape(op.inputs[0])) == 1)
        for operand, known in zip(op.inputs, (self._slots, {}), strict=True):
            elements = self._arrays.elements(operand, known)
            self._need(elements is not None and np.array_equal(elements, indices(self._num_rows, self._num_rows)))
        self._places[op.outputs[1]] = indices(self._num_rows, self._num_rows)
        self._beyond[op.outputs[1]] = repeated(self._num_rows, self._num_rows)
        self.can_stay &= not self._graph.readers[op.outputs[0]]
        self.ops[op] = RowOp(self._first, (0, 0), (0, 0))

    def _check_places(self) -> None:
        """Checks that the places of rows are only used to look rows up: they differ where devices sort."""
        graph = self._graph
        pairs = {pair for op in graph.ops() if op.bodies for pair in graph.wires(op).pairs} if self._places else ()
        equal = defaultdict[int, list[int]](list)
        for first, second in pairs:
            equal[first].append(second)
            equal[second].append(first)
        seen = self.places
        pending = [*self._places]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            self._need(value not in graph.body.outputs)
            pending += equal[value]
            for op in graph.readers[value]:
                if op.bodies or (op in self.ops and self.ops[op].column is not None and op.inputs.index(value) == 1):
                    continue
                self._need(op.is_elementwise or op.name in RENAMED or op.name == "broadcast_in_dim")
                pending += op.outputs

    def _add_counts(self, sizes: int) -> None:
        """Checks that the sizes of groups are the numbers of choices of each expert."""
        counts = counts_of(self._arrays, sizes)
        self._need(counts is not None)
        assert counts is not None and self._choices is not None
        if counts.op not in self.ops:
            self._need(count_keys(self._arrays, counts, self._keys, self._choices))
            inputs = (None, 0, 0) if counts.op.family is Family.SCATTER_ADD else (0,)
            self.ops[counts.op] = RowOp(self._first, inputs, (None,))
        self.counts |= dict.fromkeys(counts.values, self._first)
        self.chains[counts.op.outputs[0]] |= counts.values
