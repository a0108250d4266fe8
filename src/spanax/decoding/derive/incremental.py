"""The incremental form of a forward pass: what one more position needs, and what is cached for it.

The logits are wanted at one position. Going back through the program, an operation whose rows correspond is computed
for that position alone. Where all positions of a value are wanted, as those of keys by the scores of attention, its
row is computed, written to a cache, and the cache is read; under a mask that hides early positions, it is a ring of the
latest ones. A convolution reads a few rows of a cache. An operation whose rows do not correspond, such as a sort, is
computed for all positions from cached operands, unless it is in a region that is computed alone. Nothing here decides
whether the model is causal: `proof` does.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.windows import Window, windows
from spanax.trace.jaxpr.dim_maps.registry import TABLE
from spanax.trace.jaxpr.dim_maps.relations import Family, Kind
from spanax.trace.jaxpr.dim_maps.table import names
from spanax.trace.jaxpr.graph import CONTRACTIONS, REMAT, Body, Graph, Op, remat_of
from spanax.trace.jaxpr.loops import Loop, loop_of
from spanax.trace.jaxpr.provenance import propagated

RUNNING = names(Family.CUMULATIVE) - {"sort"}
"""Operations whose result of a row is computed from that of the row before."""


@dataclass(frozen=True, order=True)
class Want:
    """A value, of which only one row, that of the position, is wanted along the dims `rows`.

    Along its other positions, the latest ones are wanted if it `is_ring`.
    """

    value: int
    rows: tuple[int, ...] = ()
    is_ring: bool = False


class How(Enum):
    """How a wanted value is computed in a step.

    COMPUTE: by its operation, on rows of operands.
    WINDOW: by an operation along the sequence, on a few rows of operands.
    CUT: as the row of the value at all positions.
    CACHE: by writing the row to the cache of the value, of all positions or a ring of the latest, and reading it.
    KEEP: by reading the cache, filled once from inputs that do not change.
    STATE: by one iteration of a scan over positions, from the cached carry.
    TOTAL: by a cumulative operation, from its cached result of the row before.
    LOOP: by a scan over layers, on rows of the carry.
    CALL: by the body of a remat, on rows of its inputs.
    ALONE: by a region, as in the forward pass of one token, or of one block.
    """

    COMPUTE = auto()
    WINDOW = auto()
    CUT = auto()
    CACHE = auto()
    KEEP = auto()
    STATE = auto()
    TOTAL = auto()
    LOOP = auto()
    CALL = auto()
    ALONE = auto()


@dataclass(frozen=True, eq=False)
class Region:
    """Operations that compute a row from those of the same position, or of the block it is in, taken together.

    Attributes:
      result: the row.
      operands: what they read: rows, and what does not follow from tokens.
      ops: the operations, for all positions.
      size: the number of positions of a block.
      block: the forward pass of one block.
      alone: the corresponding operations of it.
      starts: its values for the operands.
      end: its value for the result.
      scans: by the scans of `alone`, those over blocks, whose carry is cached.
    """

    result: Want
    operands: tuple[Want, ...]
    ops: tuple[Op, ...]
    size: int
    block: Graph
    alone: tuple[Op, ...]
    starts: tuple[int, ...]
    end: int
    scans: Mapping[Op, Op]

    @property
    def cached(self) -> tuple[Want, ...]:
        """The operands of which the rows of a block are cached."""
        return tuple(want for want in self.operands if want.rows and self.size > 1)


@dataclass(frozen=True, eq=False)
class Part:
    """One operation of a step.

    Attributes:
      how: how it is computed.
      op: the operation; of a cache, the one that computes the cached value, or None for an input.
      results: what it computes.
      operands: what it reads.
      steps: those of the body of a loop over layers or of a call.
      slots: what a loop over layers carries, as the positions in its carry, and the rows.
      order: the order in which a cache has the dims of its value.
      windows: the rows that an operation along the sequence reads of its first operands.
      region: the operations between the operands and the result.
      size: the number of rows of a ring.
    """

    how: How
    op: Any
    results: tuple[Want, ...]
    operands: tuple[Want, ...] = ()
    steps: "Steps | None" = None
    slots: tuple[tuple[int, tuple[int, ...]], ...] = ()
    order: tuple[int, ...] = ()
    windows: tuple[Window, ...] = ()
    region: Region | None = None
    size: int = 0

    @property
    def inside(self) -> "Steps":
        """The steps of its body."""
        assert self.steps is not None
        return self.steps


@dataclass(frozen=True, eq=False)
class Steps:
    """What one position computes of a body, in order; `inputs` are the wanted inputs of the body."""

    body: Body
    parts: tuple[Part, ...]
    inputs: tuple[Want, ...]

    def of(self, *hows: How) -> Iterator[Part]:
        """Yields the parts that are computed in some ways."""
        return (part for part in self.parts if part.how in hows)


def all_steps(steps: Steps) -> Iterator[Steps]:
    """Yields the steps of a body, after those of bodies inside."""
    for part in steps.of(How.LOOP, How.CALL):
        yield from all_steps(part.inside)
    yield steps


@dataclass(frozen=True, eq=False)
class Rings:
    """Caches of the latest positions alone, and what is computed of them.

    Attributes:
      size: the number of rows.
      banded: the values under a mask that lets only the latest positions pass.
      graph: the forward pass of as many tokens as a ring has rows.
      twins: its operations, by those of the pass of all tokens.
    """

    size: int
    banded: frozenset[int]
    graph: Graph
    twins: Mapping[Op, Op]

    def has_ring(self, forward: Forward, want: Want) -> bool:
        """Whether a value has positions along other dims than its rows."""
        sizes = enumerate(zip(forward.graph.shape(want.value), self.graph.shape(want.value), strict=True))
        return any(long != short for dim, (long, short) in sizes if dim not in want.rows)


@dataclass(frozen=True, eq=False)
class Shortcuts:
    """What a step may leave out: the regions that are computed alone, by result, and the rings that are caches."""

    regions: Mapping[int, Region] = field(default_factory=dict)
    rings: Rings | None = None


def incremental(forward: Forward, shortcuts: Shortcuts) -> Steps:
    """Returns what one position computes of a forward pass."""
    body = forward.graph.body
    derivation = _Derivation(forward, _entangled(forward), shortcuts, body, owned=forward.arrays)
    return derivation.steps([Want(forward.logits, (1,))])


def _entangled(forward: Forward) -> frozenset[int]:
    """Returns the values that only elementwise work separates from an operation along the sequence.

    Where all positions of one are wanted, they are computed from those of the operation. A cached row could contradict
    them: the place of a later token in an expert is that of the current one, which took it.
    """

    def transfer(op: Op, operands: list[int]) -> int:
        return int(op.name not in CONTRACTIONS and (any(operands) or mixes(forward, op)))

    return frozenset(value for value, bit in enumerate(propagated(forward.graph, {}, transfer)) if bit)


def mixes(forward: Forward, op: Op) -> bool:
    """Whether an operation without a body reads positions, and does not compute rows of its results."""
    if not any(forward.follows_tokens(value) and forward.positions(value) for value in op.inputs):
        return False
    wants = [Want(value, forward.positions(value)) for value in op.outputs]
    return any(not want.rows or not _computes_rows(forward.graph, op, want) for want in wants)


@dataclass(eq=False)
class _Derivation:
    """The derivation for one body.

    Attributes:
      forward: the forward pass.
      entangled: values that are not cached.
      shortcuts: what is left out.
      body: the body.
      owned: its inputs that are cached here, and not by the surrounding body.
      wants: the wanted rows of each value.
      parts: the parts, from the last to the first.
    """

    forward: Forward
    entangled: frozenset[int]
    shortcuts: Shortcuts
    body: Body
    owned: tuple[int, ...] = ()
    wants: defaultdict[int, set[Want]] = field(default_factory=lambda: defaultdict(set))
    parts: list[Part] = field(default_factory=list)

    def steps(self, wanted: Iterable[Want]) -> Steps:
        """Returns the steps that compute what is wanted of the body."""
        self.need(wanted)
        for op in reversed(self.body.ops):
            direct = [want for value in op.outputs for want in self._direct(value)]
            if direct:
                self._compute(op, direct)
        inputs = []
        for value in self.body.inputs:
            inputs += self._direct(value) if value in self.owned else sorted(self.wants[value])
        return Steps(self.body, tuple(reversed(self.parts)), tuple(inputs))

    def need(self, wanted: Iterable[Want]) -> None:
        for want in wanted:
            self.wants[want.value].add(want)

    def _direct(self, value: int) -> list[Want]:
        """Returns what to compute of a value, after what a cache provides."""
        wants = self.wants[value]
        producer = self.forward.graph.producers.get(value)
        if Want(value) in wants and self.forward.follows_context(value):
            self.parts.append(Part(How.KEEP, producer, (Want(value),)))
            wants = wants - {Want(value)}
        whole = {want for want in wants if not want.rows}
        if whole and self._is_cached(value):
            row = Want(value, self.forward.positions(value))
            order = _order(self.forward, value)
            results = tuple(sorted(whole))
            self.parts.append(Part(How.CACHE, producer, results, (row,), order=order, size=self._ring_size))
            wants = wants - whole | {row}
        return sorted(wants)

    @property
    def _ring_size(self) -> int:
        return 0 if self.shortcuts.rings is None else self.shortcuts.rings.size

    def _is_cached(self, value: int) -> bool:
        """Whether the row of a value is computed and cached, where all positions are wanted."""
        forward = self.forward
        rows = forward.positions(value)
        if not forward.follows_tokens(value) or len(rows) != 1:
            return False
        op = forward.graph.producers.get(value)
        if op is None or value in self.entangled:
            return value in self.owned
        return self._has_rows(op, Want(value, rows)) and not self._expands(op, value)

    def _expands(self, op: Op, value: int) -> bool:
        """Whether an operation only repeats or widens a smaller operand, which is cached in its place."""
        if op.family is not Family.VIEW and op.name != "convert_element_type":
            return False
        graph = self.forward.graph
        operand = op.inputs[0]
        is_sequence = self.forward.follows_tokens(operand) and len(self.forward.positions(operand)) == 1
        return is_sequence and graph.num_bytes(operand) < graph.num_bytes(value)

    def _has_rows(self, op: Op, want: Want) -> bool:
        """Whether an operation computes the wanted rows without the others."""
        if op.name == "scan":
            loop = loop_of(self.forward.graph, op)
            is_stacked = want.value in loop.stacked
            if self._is_over_positions(loop):
                return is_stacked and want.rows == (0,)
            return not (is_stacked and 0 in want.rows)
        return _is_call(op) if op.bodies else _computes_rows(self.forward.graph, op, want)

    def _is_over_positions(self, loop: Loop) -> bool:
        """Whether a scan runs over the positions of the sequence, in either direction."""
        forward = self.forward
        stacked = [*loop.scanned, *loop.stacked]
        is_over = any(0 in forward.positions(value) and forward.follows_tokens(value) for value in stacked)
        return is_over and loop.op.params["length"] == forward.length

    def _compute(self, op: Op, direct: list[Want]) -> None:
        """Adds the parts that compute wanted results of an operation."""
        region = self.shortcuts.regions.get(direct[0].value)
        if region is not None and direct == [region.result]:
            self.parts.append(Part(How.ALONE, op, (region.result,), region.operands, region=region))
            self.need(region.operands)
            return
        if op.name == "scan" and self._scan(loop_of(self.forward.graph, op), direct):
            return
        if op.bodies and _is_call(op):
            self._call(op, direct)
            return
        if self._is_running(op, direct):
            operand = Want(op.inputs[0], direct[0].rows)
            self.parts.append(Part(How.TOTAL, op, tuple(direct), (operand,)))
            self.need([operand])
            return
        whole = {want.is_ring for want in direct if not want.rows}
        for want in direct:
            if not want.rows:
                continue
            rows = None if op.bodies else row_form(op, want)
            found = windows_of(self.forward.graph, op, want) if rows is None else None
            if found is not None:
                read = [window.value for window in found]
                operands = tuple(map(Want, [*read, *op.inputs[len(read) :]]))
                self.parts.append(Part(How.WINDOW, op, (want,), operands, windows=found))
                self.need(operands)
            elif rows is None:
                self.parts.append(Part(How.CUT, op, (want,), (replace(want, rows=()),)))
                whole.add(want.is_ring)
            else:
                self._by_operation(op, (want,), rows)
        for is_ring in sorted(whole):
            self._by_operation(op, tuple(Want(value, (), is_ring) for value in op.outputs), [()] * len(op.inputs))

    def _by_operation(self, op: Op, results: tuple[Want, ...], rows: Iterable[tuple[int, ...]]) -> None:
        """Adds the part that computes results from rows of operands.

        Where other positions than rows are those of rings, of a result or under a mask, so are those of all operands.
        """
        rings = self.shortcuts.rings
        operands = tuple(Want(value, each) for value, each in zip(op.inputs, rows, strict=False))
        if rings is not None and (results[0].is_ring or not rings.banded.isdisjoint(op.inputs)):
            operands = tuple(replace(want, is_ring=rings.has_ring(self.forward, want)) for want in operands)
            op = rings.twins[op]
        self.parts.append(Part(How.COMPUTE, op, results, operands, size=self._ring_size))
        self.need(operands)

    def _is_running(self, op: Op, direct: list[Want]) -> bool:
        """Whether the row of a cumulative operation along the sequence is wanted, and not all positions of it."""
        return (
            op.name in RUNNING
            and not op.params["reverse"]
            and self.forward.follows_tokens(op.outputs[0])
            and all(want.rows == (op.params["axis"],) for want in direct)
        )

    def _call(self, op: Op, direct: list[Want]) -> None:
        (body,) = op.bodies
        inner = dict(zip(op.outputs, body.outputs, strict=True))
        steps = _Derivation(self.forward, self.entangled, self.shortcuts, body).steps(
            replace(want, value=inner[want.value]) for want in direct
        )
        outer = dict(zip(body.inputs, op.inputs, strict=True))
        operands = tuple(replace(want, value=outer[want.value]) for want in steps.inputs)
        self.parts.append(Part(How.CALL, op, tuple(direct), operands, steps))
        self.need(operands)

    def _scan(self, loop: Loop, direct: list[Want]) -> bool:
        """Adds the part of a scan that computes rows; returns False if it does not."""
        if not all(self._has_rows(loop.op, want) for want in direct):
            return False
        if self._is_over_positions(loop):
            if loop.op.params["reverse"]:
                return False
            operands = (*map(Want, loop.consts), *(Want(value, (0,)) for value in loop.scanned))
            self.parts.append(Part(How.STATE, loop.op, tuple(direct), operands))
            self.need(operands)
            return True
        if not any(self.forward.follows_tokens(value) for value in loop.op.outputs):
            return False
        self._layers(loop, direct)
        return True

    def _layers(self, loop: Loop, direct: list[Want]) -> None:
        """Adds a scan over layers: the rows of the carry that a layer reads are those that it computes."""
        body = loop.body
        slots = {(loop.results.index(want.value), want.rows) for want in direct if want.value in loop.results}
        stacked = [
            Want(body.outputs[loop.op.outputs.index(want.value)], tuple(row - 1 for row in want.rows))
            for want in direct
            if want.value in loop.stacked
        ]
        while True:
            carried = [Want(body.outputs[index], rows) for index, rows in sorted(slots)]
            steps = _Derivation(self.forward, self.entangled, self.shortcuts, body, loop.body_carried).steps(
                [*carried, *stacked]
            )
            read = {
                (loop.body_carried.index(want.value), want.rows)
                for want in steps.inputs
                if want.value in loop.body_carried
            }
            if read <= slots:
                break
            slots |= read
        outer = dict(zip(body.inputs, loop.op.inputs, strict=True))
        operands = [Want(loop.carried[index], rows) for index, rows in sorted(slots)]
        for want in steps.inputs:
            if want.value not in loop.body_carried:
                shift = 1 if want.value in loop.body_scanned else 0
                rows = tuple(row + shift for row in want.rows)
                operands.append(replace(want, value=outer[want.value], rows=rows))
        part = Part(How.LOOP, loop.op, tuple(direct), tuple(operands), steps, tuple(sorted(slots)))
        self.parts.append(part)
        self.need(operands)


def _order(forward: Forward, value: int) -> tuple[int, ...]:
    """Returns the order of dims in which XLA multiplies a value: a cache in another order is copied by every step.

    Batch dims, as those of heads, are first; the contracted dims of the right operand precede the others.
    """
    dims = range(len(forward.graph.shape(value)))
    for op in forward.graph.readers.get(value, ()):
        if op.name == "dot_general":
            side = op.inputs.index(value)
            contracted, batch = (each[side] for each in op.params["dimension_numbers"])
            free = [dim for dim in dims if dim not in contracted and dim not in batch]
            return (*batch, *free, *contracted) if side == 0 else (*batch, *contracted, *free)
    return tuple(dims)


def _is_call(op: Op) -> bool:
    """Whether an operation runs one body once, on all of its operands."""
    return op.name in REMAT or remat_of(op.eqn) is not None


def _computes_rows(graph: Graph, op: Op, want: Want) -> bool:
    """Whether an operation without a body computes wanted rows without the others."""
    return row_form(op, want) is not None or windows_of(graph, op, want) is not None


def windows_of(graph: Graph, op: Op, want: Want) -> tuple[Window, ...] | None:
    """Returns the rows that an operation along the sequence reads of its operands; None if it needs all of them."""
    return windows(graph, op, want.rows[0]) if len(want.rows) == 1 and not op.bodies else None


def row_form(op: Op, want: Want) -> tuple[tuple[int, ...], ...] | None:
    """Returns the rows of each operand and result from which an operation computes wanted rows; None if it cannot.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> x = jax.ShapeDtypeStruct((4, 3), "float32")
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: (x + x.T.T, jax.lax.cumsum(x)))(x))
      >>> add, cumsum = (graph.producers[value] for value in graph.body.outputs)
      >>> row_form(add, Want(add.outputs[0], (0,))), row_form(cumsum, Want(cumsum.outputs[0], (0,)))
      (((0,), (0,), (0,)), None)
    """
    row = TABLE.get(op.name)
    if row is None or row.padding is None:
        return None
    result = len(op.inputs) + op.outputs.index(want.value)
    along = op.dim_map.dims(Kind.ALONG)
    found: list[set[int]] = [set() for _ in (*op.inputs, *op.outputs)]
    for dim in want.rows:
        if (result, dim) in along:
            return None
        relation = next((each for each in op.dim_map.relations if (result, dim) in each.dims), None)
        if relation is None or relation.kind not in (Kind.SAME, Kind.REPEATED, Kind.NEW):
            return None
        if relation.kind is Kind.NEW and op.family is not Family.IOTA:
            return None
        for array, other in relation.dims:
            found[array].add(other)
    return tuple(tuple(sorted(dims)) for dims in found)
