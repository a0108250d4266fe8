"""Which values a fusing compiler writes to memory, and how often each is read.

Elementwise operations and data movement are fused into their consumers. A matmul, a loop or a gather is a kernel of its
own. The result does not depend on the layout.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.graph import Body, Graph, Op

ALIASES = frozenset("reshape transpose squeeze broadcast_in_dim expand_dims copy sharding_constraint".split())
"""Another view of the same numbers: whoever reads one reads the other."""

FUSED = ELEMENTWISE | ALIASES | {"slice", "pad", "concatenate", "iota", "rev", "tile", "split", "squeeze", "clamp"}
"""What needs no kernel of its own."""

REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax argmin".split()
)
"""Fused with what makes their operand; along the last dims, also with what follows (softmax, norms)."""


@dataclass(frozen=True, slots=True)
class Access:
    """A value that fused kernels write or read so many times in one run of its body."""

    value: int
    writes: int
    reads: int


def memory_plan(graph: Graph) -> dict[Body, "Kept"]:
    """For every body, the values that are kept in memory between kernels; all others live only inside one."""
    return {body: Kept(graph, body) for body in _bodies(graph.body)}


def accesses(graph: Graph, body: Body) -> tuple[list[Access], int]:
    """What the fused kernels of one body access, bodies inside it aside; and how many kernels they are."""
    found = Kept(graph, body)
    reads: dict[int, set[int]] = defaultdict(set)
    for value in found.written:
        for source in found.sources(value):
            made_here = source in found.written and found.made_at[source] == found.made_at[value]
            if not made_here:
                reads[source].add(found.made_at[value])
    values = sorted({*reads, *found.written})
    levels = {found.made_at[value] for value in found.written}
    return [Access(value, int(value in found.written), len(reads.get(value, ()))) for value in values], len(levels)


class Kept:
    """One body, op by op: the root of every view, its levels, and what is kept.

    What is made at one level can be made in one kernel: a level ends where a kernel of its own, or a reduction whose
    result must be whole first, stands between. Such a reduction is made at one level and can be read from the next on.
    """

    def __init__(self, graph: Graph, body: Body):
        self.graph, self._body = graph, body
        self.root: dict[int, int] = {}
        self.level: dict[int, int] = defaultdict(int)
        self.made_at: dict[int, int] = defaultdict(int)
        self.kept: set[int] = set(body.inputs)
        self.written: set[int] = set()
        self._maker: dict[int, Op] = {}
        self._sources: dict[int, frozenset[int]] = {}
        readers: dict[int, set[int]] = defaultdict(set)
        for op in body.ops:
            ins = [self.of(value) for value in op.inputs]
            level = max((self.level[value] for value in ins), default=0)
            if op.name in ALIASES:
                self.root[op.outputs[0]] = ins[0]
                continue
            if op.name in FUSED or op.name in REDUCTIONS:
                for value in ins:
                    readers[value].add(level)
                ends = op.name in REDUCTIONS and not _is_along_last(graph, op)
                for value in op.outputs:
                    self.level[value], self.made_at[value] = level + ends, level
                    self._maker[value] = op
                    if ends:
                        self._keep(value)
            else:
                for value in ins:
                    self._keep(value)
                for value in op.outputs:
                    self.level[value] = level + 1
                    self.kept.add(value)
        for value in body.outputs:
            self._keep(self.of(value))
        for op in body.ops:
            for value in op.outputs:
                if value in self._maker and value not in self.kept and len(readers[value]) > 1:
                    size = lambda v: _num_bytes(graph, v)  # noqa: E731
                    if sum(map(size, self.sources(value))) > size(value):
                        self._keep(value)

    def last_reads(self, ops: Sequence[Op]) -> dict[int, int]:
        """Of the body's operations in some order the last that needs each kept value.

        A fused kernel reads all when its last one is done.
        """
        last: dict[int, int] = {}
        for at, op in enumerate(ops):
            for value in op.inputs:
                last[self.of(value)] = at
            for value in op.outputs:
                for source in self.sources(value) if value in self.written else ():
                    last[source] = at
        for value in self._body.outputs:
            last[self.of(value)] = len(ops)
        return last

    def of(self, value: int) -> int:
        """What a view is a view of."""
        return self.root.get(value, value)

    def sources(self, value: int) -> frozenset[int]:
        """The kept values from which a fused kernel makes this one."""
        left = [value]
        while left:  # a sum over all parameters is as deep as they are many: no recursion
            last = left[-1]
            given = [] if last in self._sources else [self.of(one) for one in self._maker[last].inputs]
            unknown = [one for one in given if self._is_inside(one) and one not in self._sources]
            if unknown:
                left += unknown
                continue
            left.pop()
            if last not in self._sources:
                found = set[int]()
                for one in given:
                    found |= self._sources[one] if self._is_inside(one) else {one}
                self._sources[last] = frozenset(source for source in found if source in self.kept)
        return self._sources[value]

    def _is_inside(self, value: int) -> bool:
        """Whether a value lives only inside of a kernel."""
        return value in self._maker and value not in self.kept

    def _keep(self, value: int) -> None:
        self.kept.add(value)
        if value in self._maker and value not in self.written:
            self.written.add(value)


def _bodies(body: Body) -> Iterator[Body]:
    yield body
    for op in body.ops:
        for inner in op.bodies:
            yield from _bodies(inner)


def _is_along_last(graph: Graph, op: Op) -> bool:
    """Whether a reduction runs along the last dims only, so that its kernel holds what it reduces."""
    axes = sorted(op.params.get("axes", op.params.get("dimensions", ())))
    rank = len(graph.shape(op.inputs[0]))
    return bool(axes) and len(axes) < rank and axes == list(range(rank - len(axes), rank))


def _num_bytes(graph: Graph, value: int) -> int:
    aval = graph.avals[value]
    return int(getattr(aval, "size", 1)) * int(getattr(getattr(aval, "dtype", None), "itemsize", 4))
