"""Finds the values that a fusing compiler writes to memory, and counts their reads.

Elementwise operations and data movement are fused into their consumers. A matmul, a loop or a gather is a separate
kernel. The result does not depend on the layout.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.dim_maps.table import names
from spanax.trace.jaxpr.graph import Body, Graph, Op

ALIASES = names(Family.VIEW) | {"copy", "sharding_constraint"}
"""Operations whose result is a view of their operand."""

FUSED = frozenset({Family.ELEMENTWISE, Family.VIEW, Family.REORDER, Family.RESIZE, Family.IOTA, Family.REDUCTION})
"""Operations that are fused instead of running as a separate kernel.

Reductions are fused with the producer of their operand; along the last dims, also with their consumers (softmax).
"""


@dataclass(frozen=True, slots=True)
class Access:
    """The number of writes and reads of a value by fused kernels in one run of its body."""

    value: int
    writes: int
    reads: int


def memory_plan(graph: Graph) -> dict[Body, "Kept"]:
    """Returns, for every body, the values stored in memory between kernels; all others live inside one kernel."""
    bodies = (graph.body, *(body for op in graph.ops() for body in op.bodies))
    return {body: Kept(graph, body) for body in bodies}


def accesses(graph: Graph, body: Body) -> tuple[list[Access], int]:
    """Returns the accesses of the fused kernels of a body, without nested bodies, and the number of these kernels."""
    plan = Kept(graph, body)
    reads: dict[int, set[int]] = defaultdict(set)
    for value in plan.written:
        for source in plan.sources(value):
            is_same_kernel = source in plan.written and plan.computed_at[source] == plan.computed_at[value]
            if not is_same_kernel:
                reads[source].add(plan.computed_at[value])
    values = sorted({*reads, *plan.written})
    levels = {plan.computed_at[value] for value in plan.written}
    return [Access(value, int(value in plan.written), len(reads.get(value, ()))) for value in values], len(levels)


class Kept:
    """The values of one body stored in memory, with the root of every view and the fusion level of every value.

    Values of one level can be computed by one kernel: a level ends at an unfused operation, or at a reduction that
    must complete first. Such a reduction is computed at one level and can be read from the next level on.
    """

    def __init__(self, graph: Graph, body: Body):
        self.graph = graph
        self._body = body
        self.root: dict[int, int] = {}
        self.level: dict[int, int] = defaultdict(int)
        self.computed_at: dict[int, int] = defaultdict(int)
        self.kept: set[int] = set(body.inputs)
        self.written: set[int] = set()
        self._fused: set[int] = set()
        self._sources: dict[int, frozenset[int]] = {}
        readers: dict[int, set[int]] = defaultdict(set)
        for op in body.ops:
            ins = [self.of(value) for value in op.inputs]
            level = max((self.level[value] for value in ins), default=0)
            if op.name in ALIASES:
                self.root[op.outputs[0]] = ins[0]
                continue
            if op.family in FUSED:
                for value in ins:
                    readers[value].add(level)
                ends_level = op.family is Family.REDUCTION and not _is_along_last(graph, op)
                for value in op.outputs:
                    self.level[value] = level + ends_level
                    self.computed_at[value] = level
                    self._fused.add(value)
                    if ends_level:
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
                if value in self._fused and value not in self.kept and len(readers[value]) > 1:
                    if sum(map(graph.num_bytes, self.sources(value))) > graph.num_bytes(value):
                        self._keep(value)

    def last_reads(self, ops: Sequence[Op]) -> dict[int, int]:
        """Returns, for each stored value, the index in `ops` of its last consumer.

        A fused kernel reads its operands until its last operation is done.
        """
        last: dict[int, int] = {}
        for index, op in enumerate(ops):
            for value in op.inputs:
                last[self.of(value)] = index
            for value in op.outputs:
                for source in self.sources(value) if value in self.written else ():
                    last[source] = index
        for value in self._body.outputs:
            last[self.of(value)] = len(ops)
        return last

    def of(self, value: int) -> int:
        """Returns the value that a view refers to, or the value itself."""
        return self.root.get(value, value)

    def sources(self, value: int) -> frozenset[int]:
        """Returns the stored values from which a fused kernel computes this value."""
        if value not in self._sources:
            stack = [value]
            seen = set[int]()
            while stack:
                operands = {self.of(operand) for operand in self.graph.producers[stack.pop()].inputs} - seen
                seen |= operands
                stack += filter(self._is_inside, operands)
            self._sources[value] = frozenset(operand for operand in seen if operand in self.kept)
        return self._sources[value]

    def _is_inside(self, value: int) -> bool:
        """Returns whether a value lives only inside a kernel."""
        return value in self._fused and value not in self.kept

    def _keep(self, value: int) -> None:
        self.kept.add(value)
        if value in self._fused and value not in self.written:
            self.written.add(value)


def _is_along_last(graph: Graph, op: Op) -> bool:
    """Returns whether a reduction is along the last dims only, so that its operand can stay in the kernel."""
    axes = sorted(op.params.get("axes", op.params.get("dimensions", ())))
    rank = len(graph.shape(op.inputs[0]))
    return bool(axes) and len(axes) < rank and axes == list(range(rank - len(axes), rank))


UNMERGED = frozenset({"optimization_barrier"})
"""Operations that compilers never merge: barriers separate recomputed values from those of the forward pass."""


def repeated_ops(graph: Graph) -> frozenset[Op]:
    """Returns the operations that equal an earlier operation of the same body with equal operands.

    Operations with bodies (loops, branches, rematerialized regions) or effects equal no other.
    Source: openxla/xla xla/hlo/transforms/simplifiers/hlo_cse.cc (`HloCSE`); the programs of gan and perceiver in
    tests/data/program_cells.json.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: (x @ x) + jax.numpy.sin(x @ x))(jax.numpy.ones((2, 2))))
      >>> [op.name for op in repeated_ops(graph)]
      ['dot_general']
    """
    result = set[Op]()
    _visit(graph.body, _equal_constants(graph), result)
    return frozenset(result)


def _equal_constants(graph: Graph) -> dict[int, int]:
    """Returns, for every scalar constant, the first equal one."""
    seen = dict[tuple[str, str], int]()
    scalars = [value for value in graph.constants if not graph.shape(value)]
    keys = [(str(getattr(graph.avals[value], "dtype", "")), repr(graph.constants[value])) for value in scalars]
    return {value: seen.setdefault(key, value) for value, key in zip(scalars, keys, strict=True)}


def _visit(body: Body, constants: dict[int, int], result: set[Op]) -> None:
    number = dict(constants)
    seen = dict[tuple[Any, ...], Op]()
    for op in body.ops:
        for inner in op.bodies:
            _visit(inner, constants, result)
        if op.bodies or op.eqn.effects or op.name in UNMERGED:
            continue
        key = (op.name, _params(op.params.items()), tuple(number.get(value, value) for value in op.inputs))
        first = seen.setdefault(key, op)
        if first is not op:
            result.add(op)
            number |= {value: number.get(equal, equal) for value, equal in zip(op.outputs, first.outputs, strict=True)}


def _params(items: Iterable[tuple[str, Any]]) -> tuple[Any, ...]:
    """Returns a hashable form of an operation's parameters, in which only equal parameters are equal."""
    return tuple((name, value if _is_hashable(value) else id(value)) for name, value in items)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
