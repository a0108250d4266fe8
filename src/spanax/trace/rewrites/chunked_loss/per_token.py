"""Matches the part of a loss that handles logits token by token.

It begins with a product of activations and a weight, and ends where tokens are reduced or the vocabulary dim is gone.
One token dim is followed: an operation that is independent per row can be evaluated on a subset of the rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax.numpy as jnp

from spanax.trace.jaxpr.dim_rules import ELEMENTWISE, reshape_groups
from spanax.trace.jaxpr.lines import Line, Lines

REDUCING = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
ALONG = {"cumsum": "axis", "cummax": "axis", "cumlogsumexp": "axis", "sort": "dimension", "concatenate": "dimension"}
"""Operations that work along one dim, and the parameter that names it."""

HALF = 2
"""A value of at least one such part of the logits' numbers is not to be left whole."""

Dims = tuple[int | None, ...]
"""Of every operand, the dim that is followed; None of one that every row takes alike."""


@dataclass(frozen=True, eq=False)
class Region:
    """Lines that work on the rows of one dim one by one.

    Attributes:
      lines: their places, in order; the first is the product.
      dims: for every value that is divided, along which of its dims.
      fixed: what comes in and every row takes alike.
      scanned: what comes in and is divided.
      outs: what others read of it.
      logits: how many numbers the product has.
    """

    lines: tuple[int, ...]
    dims: dict[int, int]
    fixed: tuple[int, ...]
    scanned: tuple[int, ...]
    outs: tuple[int, ...]
    logits: int

    def most_chunks(self, lines: Lines) -> int:
        """What the number of chunks must divide."""
        return math.gcd(*(lines.shape(value)[dim] for value, dim in self.dims.items()))


@dataclass(frozen=True)
class Mismatch:
    """Logits that cannot be taken in chunks, and why."""

    why: str
    line: Line


def regions(lines: Lines, batch: frozenset[int]) -> list[Region] | Mismatch | None:
    """The largest logits of some lines with what is done of them; why not; or None where there are no logits.

    Args:
      lines: a loss.
      batch: the values among its inputs that come with the batch.
    """
    heads = sorted(_heads(lines, batch), key=lambda head: (-math.prod(lines.shape(lines.lines[head[0]].outs[0])), head))
    found: list[Region] = []
    refused: dict[int, Mismatch] = {}
    for at, dims in heads:
        if any(at in one.lines for one in found):
            continue
        grown = [_Growing(lines, at, dim).region() for dim in dims]
        good = [one for one in grown if isinstance(one, Region)]
        if good:
            found.append(max(good, key=lambda one: (divisor := one.most_chunks(lines)) & -divisor))
        else:
            refused |= dict.fromkeys([at], next(one for one in grown if isinstance(one, Mismatch)))
    if not found:
        return refused[max(refused)] if refused else None
    large = [one for one in found if HALF * one.logits >= found[0].logits]
    return _independent(lines, sorted(large, key=lambda one: one.lines))


def _heads(lines: Lines, batch: frozenset[int]) -> Iterator[tuple[int, list[int]]]:
    """Products of activations and a weight, each with the result's dims that are tokens, the last first."""
    grows = set(batch)
    for at, line in enumerate(lines.lines):
        if not grows.isdisjoint(line.ins):
            grows.update(line.outs)
        if line.name != "dot_general" or not jnp.issubdtype(lines.avals[line.outs[0]].dtype, jnp.floating):
            continue
        (contracted, batched), is_activation = line.eqn.params["dimension_numbers"], [v in grows for v in line.ins]
        if any(batched) or sum(is_activation) != 1:
            continue
        side = is_activation.index(True)
        free = [len(lines.shape(value)) - len(dims) for value, dims in zip(line.ins, contracted, strict=True)]
        first = 0 if side == 0 else free[0]
        dims = [dim for dim in range(first, first + free[side]) if lines.shape(line.outs[0])[dim] > 1]
        if dims and free[1 - side]:
            yield at, dims[::-1]


def _independent(lines: Lines, found: list[Region]) -> list[Region]:
    """Of several, those that need nothing of what another one makes."""
    kept: list[Region] = []
    for one in found:
        made = dependents(lines, [value for other in kept for value in other.outs])
        if made.isdisjoint((*one.scanned, *one.fixed)):
            kept.append(one)
    return kept


def dependents(lines: Lines, values: list[int]) -> set[int]:
    """These values and all that is made of them."""
    found = set(values)
    for line in lines.lines:
        if not found.isdisjoint(line.ins):
            found.update(line.outs)
    return found


@dataclass(eq=False)
class _Growing:
    """A region as it grows from its product, along one dim of it."""

    lines: Lines
    first: int
    dim: int
    dims: dict[int, int] = field(default_factory=dict)
    made: dict[int, None] = field(default_factory=dict)
    fixed: dict[int, None] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    beside: dict[int, int] = field(default_factory=dict)

    def region(self) -> Region | Mismatch:
        """Take in what reads the logits, and what is as large as they are and made for that."""
        roots, is_whole = {self.first: self.dim}, False
        while not is_whole:
            refused = self._grow(roots)
            if refused is not None:
                return refused
            more = {self.lines.maker[value]: dim for value, dim in self.beside.items() if value not in self.made}
            is_whole, roots = not more, roots | more
        scanned = tuple(value for value in self.dims if value not in self.made)
        return Region(tuple(self.members), self.dims, tuple(self.fixed), scanned, self._outs(), self._num_logits)

    def _grow(self, roots: dict[int, int]) -> Mismatch | None:
        self.dims, self.made, self.fixed, self.members, self.beside = {}, {}, {}, [], {}
        after = set[int]()
        for at, line in enumerate(self.lines.lines[min(roots) :], min(roots)):
            has = [value for value in line.ins if value in self.made]
            if not has and at not in roots and after.isdisjoint(line.ins):
                continue
            if after.isdisjoint(line.ins) and self._joins(line, roots.get(at)):
                self.members.append(at)
                continue
            after.update(line.outs)
            if any(map(self._is_large, has)):
                return Mismatch(f"'{line.name}' takes all of the logits, or tokens together", line)
        if any(map(self._is_large, self._outs())):
            return Mismatch("its logits are among the results", self.lines.lines[self.first])
        return None

    def _joins(self, line: Line, root: int | None) -> bool:
        """Take a line in, if it works on rows one by one; of a root it is known which dim of its result."""
        is_product = line.name == "dot_general"
        if line.eqn.effects or (root is None and is_product):
            return False
        for dim in range(len(self.lines.shape(line.outs[0]))) if root is None else (root,):
            wanted = across(self.lines, line, dim)
            if wanted is None or not self._agrees(line, wanted):
                continue
            for value, at in zip(line.ins, wanted, strict=True):
                if at is None:
                    self.fixed |= {} if value in self.lines.known else {value: None}
                    continue
                self.dims[value] = at
                maker = self.lines.made_by(value)
                if not is_product and maker is not None and self._is_large(value):
                    self.beside |= {} if across(self.lines, maker, at) is None else {value: at}
            self.dims |= dict.fromkeys(line.outs, dim)
            self.made |= dict.fromkeys(line.outs)
            return True
        return False

    def _agrees(self, line: Line, wanted: Dims) -> bool:
        """Whether no operand is divided along another dim already, or divided here and whole there."""
        return all(
            value not in self.dims if at is None else self.dims.get(value, at) == at and value not in self.fixed
            for value, at in zip(line.ins, wanted, strict=True)
        )

    def _outs(self) -> tuple[int, ...]:
        members = set(self.members)
        read = {value for at, line in enumerate(self.lines.lines) if at not in members for value in line.ins}
        return tuple(value for value in self.made if value in read or value in self.lines.outputs)

    @property
    def _num_logits(self) -> int:
        return math.prod(self.lines.shape(self.lines.lines[self.first].outs[0]))

    def _is_large(self, value: int) -> bool:
        return HALF * math.prod(self.lines.shape(value)) >= self._num_logits


def across(lines: Lines, line: Line, dim: int) -> Dims | None:
    """The dims of a line's operands that its result's dim is, if each of its rows is made of the same row of theirs."""
    shapes, out, params = [lines.shape(value) for value in line.ins], lines.shape(line.outs[0]), line.eqn.params
    if out[dim] <= 1:
        return None
    if line.name in ELEMENTWISE:
        return tuple(dim if shape and shape[dim] == out[dim] else None for shape in shapes)
    if line.name == "iota":
        return () if params["dimension"] != dim and not shapes else None
    if line.name == "dot_general":
        return _across_product(shapes, params["dimension_numbers"], dim)
    if line.name == "broadcast_in_dim":
        at = dict(zip(params["broadcast_dimensions"], range(len(shapes[0])), strict=True)).get(dim)
        is_same = at is not None and shapes[0][at] == out[dim]
        return (at if is_same else None, *[None] * (len(shapes) - 1))
    if line.name == "transpose":
        return (params["permutation"][dim],)
    if line.name in ("reshape", "squeeze"):
        groups = (group for group in reshape_groups(shapes[0], out) if group[1] and group[1][-1] == dim)
        return next(((ins[-1],) for ins, _ in groups), None)
    if line.name in REDUCING:
        kept = [at for at in range(len(shapes[0])) if at not in params["axes"]]
        return tuple(kept[dim] for _ in shapes)
    if line.name in ALONG:
        return None if params[ALONG[line.name]] == dim else (dim,) * len(shapes)
    if line.name == "slice":
        is_whole = shapes[0][dim] == out[dim]
        return (dim,) if is_whole else None
    if line.name == "pad":
        return (dim, None) if params["padding_config"][dim] == (0, 0, 0) else None
    return _across_gather(shapes, params, len(out), dim) if line.name == "gather" else None


def _across_product(shapes: list[tuple[int, ...]], numbers: tuple[tuple[tuple[int, ...], ...], ...], dim: int) -> Dims:
    (contracted, batched), found = numbers, list[tuple[int | None, int | None]](zip(*numbers[1], strict=True))
    for side in (0, 1):
        free = [at for at in range(len(shapes[side])) if at not in (*contracted[side], *batched[side])]
        found += [(at, None) if side == 0 else (None, at) for at in free]
    return found[dim]


def _across_gather(shapes: list[tuple[int, ...]], params: dict[str, object], rank: int, dim: int) -> Dims | None:
    """Rows that are taken whole, rows of which each is looked into by itself, or rows of what is looked up."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    asking = [at for at in range(rank) if at not in numbers.offset_dims]  # type: ignore[attr-defined]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))  # type: ignore[attr-defined]
    if dim in asking:
        at = asking.index(dim)
        return batching.get(at), at
    left_out = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}  # type: ignore[attr-defined]
    at = [one for one in range(len(shapes[0])) if one not in left_out][numbers.offset_dims.index(dim)]  # type: ignore[attr-defined]
    return (at, None) if sizes[at] == shapes[0][at] else None  # type: ignore[index]


def narrowed(line: Line, dim: int, wanted: Dims, count: int) -> dict[str, object]:
    """A line's parameters for one of `count` equal parts of its result's dim."""
    params = dict(line.eqn.params)
    key = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}.get(line.name)
    at: int | None = dim
    if line.name == "slice":
        key = "limit_indices"
    elif line.name == "gather" and wanted[1] is None:
        key, at = "slice_sizes", wanted[0]
    if key is not None and at is not None:
        params[key] = tuple(size // count if one == at else size for one, size in enumerate(params[key]))
    return params
