"""Matches the part of a loss that handles logits token by token.

It begins with a product of activations and a weight, and ends where tokens are reduced or the vocabulary dim is gone.
One token dim is followed: an operation that is independent per row can be evaluated on a subset of the rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import dropwhile

import jax.numpy as jnp

from spanax.trace.jaxpr.dim_rules import ELEMENTWISE, reshape_groups
from spanax.trace.jaxpr.graph import Graph, Op

REDUCING = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
ALONG = {"cumsum": "axis", "cummax": "axis", "cumlogsumexp": "axis", "sort": "dimension", "concatenate": "dimension"}
"""Operations along one dim, and the parameter that names the dim."""

HALF = 2
"""A value with at least 1 / HALF as many elements as the logits must be chunked."""

Dims = tuple[int | None, ...]
"""For each operand, its token dim; None for an operand shared by all rows."""


@dataclass(frozen=True, eq=False)
class Region:
    """Operations that are independent per row of one dim.

    Attributes:
      ops: the operations, in order; includes the product.
      dims: the token dim of each chunked value.
      fixed: inputs shared by all rows.
      scanned: inputs that are chunked.
      outs: values read outside the region.
      logits: number of elements of the product.
    """

    ops: tuple[Op, ...]
    dims: dict[int, int]
    fixed: tuple[int, ...]
    scanned: tuple[int, ...]
    outs: tuple[int, ...]
    logits: int

    def most_chunks(self, graph: Graph) -> int:
        """Returns the greatest common divisor of the sizes of the token dims."""
        return math.gcd(*(graph.shape(value)[dim] for value, dim in self.dims.items()))


@dataclass(frozen=True)
class Mismatch:
    """Logits that cannot be chunked, and why."""

    why: str
    op: Op


def regions(graph: Graph, batch: frozenset[int]) -> list[Region] | Mismatch | None:
    """Returns the regions of the largest logits; why there are none; or None without logits.

    Args:
      graph: a loss.
      batch: the inputs that belong to the batch.
    """
    heads = sorted(_heads(graph, batch), key=lambda head: -math.prod(graph.shape(head[0].outputs[0])))
    selected: list[Region] = []
    mismatches: dict[Op, Mismatch] = {}
    for op, dims in heads:
        if any(op in region.ops for region in selected):
            continue
        candidates = [_Growing(graph, op, dim).region() for dim in dims]
        valid = [region for region in candidates if isinstance(region, Region)]
        if valid:
            selected.append(max(valid, key=lambda region: (divisor := region.most_chunks(graph)) & -divisor))
        else:
            mismatches[op] = next(region for region in candidates if isinstance(region, Mismatch))
    order = graph.positions
    if not selected:
        return mismatches[max(mismatches, key=order.__getitem__)] if mismatches else None
    large = [region for region in selected if HALF * region.logits >= selected[0].logits]
    return _independent(graph, sorted(large, key=lambda region: [order[op] for op in region.ops]))


def _heads(graph: Graph, batch: frozenset[int]) -> Iterator[tuple[Op, list[int]]]:
    """Yields products of activations and a weight, each with the token dims of the result, last first."""
    dependent = set(batch)
    for op in graph.body.ops:
        if not dependent.isdisjoint(op.inputs):
            dependent.update(op.outputs)
        if op.name != "dot_general" or not jnp.issubdtype(graph.avals[op.outputs[0]].dtype, jnp.floating):
            continue
        (contracted, batched), is_activation = op.params["dimension_numbers"], [v in dependent for v in op.inputs]
        if any(batched) or sum(is_activation) != 1:
            continue
        side = is_activation.index(True)
        free = [len(graph.shape(value)) - len(dims) for value, dims in zip(op.inputs, contracted, strict=True)]
        first = 0 if side == 0 else free[0]
        dims = [dim for dim in range(first, first + free[side]) if graph.shape(op.outputs[0])[dim] > 1]
        if dims and free[1 - side]:
            yield op, dims[::-1]


def _independent(graph: Graph, candidates: list[Region]) -> list[Region]:
    """Returns the regions that do not depend on the outputs of an earlier one."""
    selected: list[Region] = []
    for region in candidates:
        dependent = dependents(graph, [value for previous in selected for value in previous.outs])
        if dependent.isdisjoint((*region.scanned, *region.fixed)):
            selected.append(region)
    return selected


def dependents(graph: Graph, values: list[int]) -> set[int]:
    """Returns these values and all values that depend on them."""
    results = set(values)
    for op in graph.body.ops:
        if not results.isdisjoint(op.inputs):
            results.update(op.outputs)
    return results


@dataclass(eq=False)
class _Growing:
    """A region grown from a product along one of its dims."""

    graph: Graph
    first: Op
    dim: int
    dims: dict[int, int] = field(default_factory=dict)
    made: dict[int, None] = field(default_factory=dict)
    fixed: dict[int, None] = field(default_factory=dict)
    members: list[Op] = field(default_factory=list)
    beside: dict[int, int] = field(default_factory=dict)

    def region(self) -> Region | Mismatch:
        """Grows the region by consumers of the logits and by producers of operands as large as the logits."""
        roots, is_complete = {self.first: self.dim}, False
        while not is_complete:
            mismatch = self._grow(roots)
            if mismatch is not None:
                return mismatch
            beside = ((value, dim) for value, dim in self.beside.items() if value not in self.made)
            new_roots = {self.graph.producers[value]: dim for value, dim in beside}
            is_complete, roots = not new_roots, roots | new_roots
        scanned = tuple(value for value in self.dims if value not in self.made)
        return Region(tuple(self.members), self.dims, tuple(self.fixed), scanned, self._outs(), self._num_logits)

    def _grow(self, roots: dict[Op, int]) -> Mismatch | None:
        self.dims, self.made, self.fixed, self.members, self.beside = {}, {}, {}, [], {}
        after = set[int]()
        for op in dropwhile(lambda op: op not in roots, self.graph.body.ops):
            region_inputs = [value for value in op.inputs if value in self.made]
            if not region_inputs and op not in roots and after.isdisjoint(op.inputs):
                continue
            if after.isdisjoint(op.inputs) and self._joins(op, roots.get(op)):
                self.members.append(op)
                continue
            after.update(op.outputs)
            if any(map(self._is_large, region_inputs)):
                return Mismatch(f"'{op.name}' takes all of the logits, or tokens together", op)
        if any(map(self._is_large, self._outs())):
            return Mismatch("its logits are among the results", self.first)
        return None

    def _joins(self, op: Op, root: int | None) -> bool:
        """Adds an operation if it is independent per row; `root` is the token dim of a root's result."""
        is_product = op.name == "dot_general"
        if op.eqn.effects or (root is None and is_product):
            return False
        for dim in range(len(self.graph.shape(op.outputs[0]))) if root is None else (root,):
            operand_dims = across(self.graph, op, dim)
            if operand_dims is None or not self._agrees(op, operand_dims):
                continue
            for value, operand_dim in zip(op.inputs, operand_dims, strict=True):
                if operand_dim is None:
                    self.fixed |= {} if value in self.graph.constants else {value: None}
                    continue
                self.dims[value] = operand_dim
                producer = self.graph.producers.get(value)
                if not is_product and producer is not None and self._is_large(value):
                    self.beside |= {} if across(self.graph, producer, operand_dim) is None else {value: operand_dim}
            self.dims |= dict.fromkeys(op.outputs, dim)
            self.made |= dict.fromkeys(op.outputs)
            return True
        return False

    def _agrees(self, op: Op, operand_dims: Dims) -> bool:
        """Whether no operand is already chunked along another dim, or both chunked and fixed."""
        return all(
            value not in self.dims
            if operand_dim is None
            else self.dims.get(value, operand_dim) == operand_dim and value not in self.fixed
            for value, operand_dim in zip(op.inputs, operand_dims, strict=True)
        )

    def _outs(self) -> tuple[int, ...]:
        members, outputs = set(self.members), set(self.graph.body.outputs)
        is_read = lambda value: not members.issuperset(self.graph.readers[value])  # noqa: E731
        return tuple(value for value in self.made if value in outputs or is_read(value))

    @property
    def _num_logits(self) -> int:
        return math.prod(self.graph.shape(self.first.outputs[0]))

    def _is_large(self, value: int) -> bool:
        return HALF * math.prod(self.graph.shape(value)) >= self._num_logits


def across(graph: Graph, op: Op, dim: int) -> Dims | None:
    """Returns the operands' dims for a dim of the result, if each row depends only on the same row of theirs."""
    shapes, out, params = [graph.shape(value) for value in op.inputs], graph.shape(op.outputs[0]), op.params
    if out[dim] <= 1:
        return None
    if op.name in ELEMENTWISE:
        return tuple(dim if shape and shape[dim] == out[dim] else None for shape in shapes)
    if op.name == "iota":
        return () if params["dimension"] != dim and not shapes else None
    if op.name == "dot_general":
        return _across_product(shapes, params["dimension_numbers"], dim)
    if op.name == "broadcast_in_dim":
        operand_dim = dict(zip(params["broadcast_dimensions"], range(len(shapes[0])), strict=True)).get(dim)
        is_same = operand_dim is not None and shapes[0][operand_dim] == out[dim]
        return (operand_dim if is_same else None, *[None] * (len(shapes) - 1))
    if op.name == "transpose":
        return (params["permutation"][dim],)
    if op.name in ("reshape", "squeeze"):
        groups = (group for group in reshape_groups(shapes[0], out) if group[1] and group[1][-1] == dim)
        return next(((ins[-1],) for ins, _ in groups), None)
    if op.name in REDUCING:
        remaining = [operand_dim for operand_dim in range(len(shapes[0])) if operand_dim not in params["axes"]]
        return tuple(remaining[dim] for _ in shapes)
    if op.name in ALONG:
        return None if params[ALONG[op.name]] == dim else (dim,) * len(shapes)
    if op.name == "slice":
        is_full = shapes[0][dim] == out[dim]
        return (dim,) if is_full else None
    if op.name == "pad":
        return (dim, None) if params["padding_config"][dim] == (0, 0, 0) else None
    return _across_gather(shapes, params, len(out), dim) if op.name == "gather" else None


def _across_product(shapes: list[tuple[int, ...]], numbers: tuple[tuple[tuple[int, ...], ...], ...], dim: int) -> Dims:
    (contracted, batched), operand_dims = numbers, list[tuple[int | None, int | None]](zip(*numbers[1], strict=True))
    for side in (0, 1):
        free = [
            free_dim for free_dim in range(len(shapes[side])) if free_dim not in (*contracted[side], *batched[side])
        ]
        operand_dims += [(free_dim, None) if side == 0 else (None, free_dim) for free_dim in free]
    return operand_dims[dim]


def _across_gather(shapes: list[tuple[int, ...]], params: dict[str, object], rank: int, dim: int) -> Dims | None:
    """Token dims of a gather: full slices of the operand, batching dims, or rows of the indices."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    index_dims = [operand_dim for operand_dim in range(rank) if operand_dim not in numbers.offset_dims]  # type: ignore[attr-defined]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))  # type: ignore[attr-defined]
    if dim in index_dims:
        operand_dim = index_dims.index(dim)
        return batching.get(operand_dim), operand_dim
    left_out = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}  # type: ignore[attr-defined]
    operand_dim = [i for i in range(len(shapes[0])) if i not in left_out][numbers.offset_dims.index(dim)]  # type: ignore[attr-defined]
    return (operand_dim, None) if sizes[operand_dim] == shapes[0][operand_dim] else None  # type: ignore[index]


def narrowed(op: Op, dim: int, wanted: Dims, count: int) -> dict[str, object]:
    """Returns an operation's parameters for one of `count` equal chunks along a dim of its result."""
    params = dict(op.params)
    key = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}.get(op.name)
    chunked_dim: int | None = dim
    if op.name == "slice":
        key = "limit_indices"
    elif op.name == "gather" and wanted[1] is None:
        key, chunked_dim = "slice_sizes", wanted[0]
    if key is not None and chunked_dim is not None:
        params[key] = tuple(size // count if i == chunked_dim else size for i, size in enumerate(params[key]))
    return params
