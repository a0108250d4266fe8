"""Matches the part of a loss that handles logits token by token.

It begins with a product of activations and a weight, and ends where tokens are reduced or the vocabulary dim is gone.
One token dim is followed: an operation that is independent per row can be evaluated on a subset of the rows.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile

import jax.numpy as jnp

from spanax.trace.jaxpr.dim_maps.relations import Family, Kind
from spanax.trace.jaxpr.graph import Graph, Op

SIZES = ("shape", "new_sizes", "limit_indices")
"""Parameters that hold the sizes of a result's dims; `slice_sizes` are of the first operand's dims."""

CHUNKED = frozenset({Family.ELEMENTWISE, Family.VIEW, Family.RESIZE, Family.REDUCTION, Family.CUMULATIVE})
CHUNKED |= {Family.GATHER, Family.IOTA, Family.OTHER}
"""Operations that are chunked where their rows are independent; others end a region."""

HALF = 2
"""A value with at least 1 / HALF as many elements as the logits must be chunked."""

Dims = tuple[int | None, ...]
"""For each operand, its token dim; None for an operand shared by all rows."""


@dataclass(frozen=True, eq=False)
class Region:
    """Operations that are independent per row of one dim.

    Attributes:
      heads: the products that it begins with.
      ops: the operations, in order; includes the products.
      dims: the token dim of each chunked value.
      fixed: inputs shared by all rows.
      scanned: inputs that are chunked.
      outs: values read outside the region.
      logits: number of elements of the largest product.
    """

    heads: tuple[Op, ...]
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
        candidates = [_Growing(graph, {op: dim}).region() for dim in dims]
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
        contracted, batched = op.params["dimension_numbers"]
        is_activation = [v in dependent for v in op.inputs]
        if any(batched) or sum(is_activation) != 1:
            continue
        side = is_activation.index(True)
        free = [len(graph.shape(value)) - len(dims) for value, dims in zip(op.inputs, contracted, strict=True)]
        first = 0 if side == 0 else free[0]
        dims = [dim for dim in range(first, first + free[side]) if graph.shape(op.outputs[0])[dim] > 1]
        if dims and free[1 - side]:
            yield op, dims[::-1]


def _independent(graph: Graph, candidates: list[Region]) -> list[Region]:
    """Returns regions that share no operations and of which none depends on another.

    Each is evaluated as a unit. A sum of per-token losses belongs to the regions of all its terms: these are merged.
    A region that cannot be merged with those before it is left out.
    """
    selected: list[Region] = []
    for region in candidates:
        related = [other for other in selected if _are_related(graph, other, region)]
        merged = _merged(graph, [*related, region]) if related else region
        rest = [other for other in selected if other not in related]
        if merged is not None and not any(_are_related(graph, other, merged) for other in rest):
            selected = [*rest, merged]
    return selected


def _are_related(graph: Graph, first: Region, second: Region) -> bool:
    """Whether two regions share operations, or one depends on the other."""
    pairs = ((first, second), (second, first))
    return not set(first.ops).isdisjoint(second.ops) or any(
        not dependents(graph, region.outs).isdisjoint((*other.scanned, *other.fixed)) for region, other in pairs
    )


def _merged(graph: Graph, parts: list[Region]) -> Region | None:
    """Returns the region of the products of several; None if it does not include all of them."""
    heads = {head: part.dims[head.outputs[0]] for part in parts for head in part.heads}
    region = _Growing(graph, heads).region()
    return region if isinstance(region, Region) and heads.keys() <= set(region.ops) else None


def dependents(graph: Graph, values: Iterable[int]) -> set[int]:
    """Returns these values and all values that depend on them."""
    results = set(values)
    for op in graph.body.ops:
        if not results.isdisjoint(op.inputs):
            results.update(op.outputs)
    return results


@dataclass(eq=False)
class _Growing:
    """A region grown from products, each along one of its dims."""

    graph: Graph
    heads: dict[Op, int]
    dims: dict[int, int] = field(default_factory=dict)
    results: dict[int, None] = field(default_factory=dict)
    fixed: dict[int, None] = field(default_factory=dict)
    members: list[Op] = field(default_factory=list)
    adjacent: dict[int, int] = field(default_factory=dict)

    def region(self) -> Region | Mismatch:
        """Grows the region by consumers of the logits and by producers of operands as large as the logits."""
        roots = self.heads
        is_complete = False
        while not is_complete:
            mismatch = self._grow(roots)
            if mismatch is not None:
                return mismatch
            adjacent = ((value, dim) for value, dim in self.adjacent.items() if value not in self.results)
            new_roots = {self.graph.producers[value]: dim for value, dim in adjacent}
            is_complete, roots = not new_roots, roots | new_roots
        scanned = tuple(value for value in self.dims if value not in self.results)
        ops = tuple(self.members)
        fixed = tuple(self.fixed)
        return Region(tuple(self.heads), ops, self.dims, fixed, scanned, self._outs(), self._num_logits)

    def _grow(self, roots: dict[Op, int]) -> Mismatch | None:
        self.dims = {}
        self.results = {}
        self.fixed = {}
        self.members = []
        self.adjacent = {}
        after = set[int]()
        for op in dropwhile(lambda op: op not in roots, self.graph.body.ops):
            region_inputs = [value for value in op.inputs if value in self.results]
            if not region_inputs and op not in roots and after.isdisjoint(op.inputs):
                continue
            if after.isdisjoint(op.inputs) and self._joins(op, roots.get(op)):
                self.members.append(op)
                continue
            after.update(op.outputs)
            if any(map(self._is_large, region_inputs)):
                return Mismatch(f"'{op.name}' uses all of the logits, or combines tokens", op)
        if any(map(self._is_large, self._outs())):
            return Mismatch("its logits are among the results", next(iter(self.heads)))
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
                    self.adjacent |= {} if across(self.graph, producer, operand_dim) is None else {value: operand_dim}
            self.dims |= dict.fromkeys(op.outputs, dim)
            self.results |= dict.fromkeys(op.outputs)
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
        members = set(self.members)
        outputs = set(self.graph.body.outputs)
        is_read = lambda value: not members.issuperset(self.graph.readers[value])  # noqa: E731
        return tuple(value for value in self.results if value in outputs or is_read(value))

    @cached_property
    def _num_logits(self) -> int:
        return max(math.prod(self.graph.shape(head.outputs[0])) for head in self.heads)

    def _is_large(self, value: int) -> bool:
        return HALF * math.prod(self.graph.shape(value)) >= self._num_logits


def across(graph: Graph, op: Op, dim: int) -> Dims | None:
    """Returns the operands' dims for a dim of the results, if each row depends only on the same row of theirs.

    A reshape has the same chunks along the last dims of two runs with the same elements.
    """
    is_chunked = op.name == "dot_general" or (op.family in CHUNKED and len(op.outputs) <= max(1, len(op.inputs)))
    if graph.shape(op.outputs[0])[dim] <= 1 or not is_chunked:
        return None
    for relation in op.dim_map.of_kind(Kind.FACTORS):
        if relation.other[-1][1] == dim:
            return (relation.dims[-1][1],)
    dims = {op.dim_map.operand_dims(dim, result) for result in range(len(op.outputs))}
    return dims.pop() if len(dims) == 1 else None


def narrowed(op: Op, dim: int, operand_dims: Dims, count: int) -> dict[str, object]:
    """Returns an operation's parameters for one of `count` equal chunks along a dim of its result."""
    params = dict(op.params)
    chunked = dict.fromkeys(SIZES, dim) | {"slice_sizes": next(iter(operand_dims), None)}
    for key in chunked.keys() & params.keys():
        sizes = enumerate(params[key])
        params[key] = tuple(size // count if i == chunked[key] and size > 1 else size for i, size in sizes)
    return params
