"""Outlines equal blocks of a loss: they become calls of one function, which JAX differentiates once.

A model with a list of blocks traces to equal operations, block after block. JAX linearizes and transposes each of
them, but only the first of several calls of one function.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jax.extend import core

from spanax.trace.jaxpr.graph import CALLS, INLINED, Body, Graph, Op, from_jaxpr, opened, source_line
from spanax.trace.jaxpr.interpret import Values, read, run
from spanax.trace.rewrites.traced_once import jaxpr_of

LEAST = 12
"""The smallest number of operations worth a call."""

PERIODS = 8
"""The number of distances between equal operations that are tried."""

RULED = INLINED - CALLS
"""Calls with a derivative rule of their own, a Python function that cannot be compared: they are no part of a block."""


def outlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an equivalent pure function in which equal blocks, one after the other, are calls of one function.

    Blocks are equal if their operations, the relations between them, and their source lines are.

    Example:
      >>> def loss(weights, x):
      ...     for w in weights:
      ...         x = x + jax.nn.softmax(jax.numpy.tanh(x @ w) * 0.5) - jax.numpy.sin(x) * jax.numpy.cos(x) / 2
      ...     return x.sum()
      >>> weights = [jax.ShapeDtypeStruct((8, 8), "float32")] * 6
      >>> jaxpr = jax.make_jaxpr(outlined(loss))(weights, jax.ShapeDtypeStruct((4, 8), "float32"))
      >>> len({eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name in CALLS})
      1
    """

    def run_outlined(*args: Any) -> Any:
        closed, shapes = jaxpr_of(function, *args)
        graph = from_jaxpr(closed, frozenset(), as_traced=True)
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(graph, *jax.tree.leaves(args)))

    return run_outlined


class _Call(NamedTuple):
    """A call of the function of equal blocks, in place of the operations from its own position to `end`."""

    function: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    end: int


class _Repetition(NamedTuple):
    """Operations from `start` to `end`, each equal to the one a period before it, except in the first period."""

    start: int
    end: int
    period: int

    @property
    def saved(self) -> int:
        """The number of operations that need not be differentiated."""
        return ((self.end - self.start) // self.period - 1) * self.period


def _evaluate(graph: Graph, *args: Any) -> list[Any]:
    """Evaluates a graph with its equal blocks as calls."""
    values: Values = dict(zip(graph.body.inputs, args, strict=True))
    ops = graph.body.ops
    calls = _calls(graph)
    position = 0
    for start in (*sorted(calls), len(ops)):
        run(graph, ops[position:start], values)
        if start in calls:
            call = calls[start]
            values.update(zip(call.outputs, call.function(*read(graph, values, call.inputs)), strict=True))
            position = call.end
    return read(graph, values, graph.body.outputs)


def _calls(graph: Graph) -> dict[int, _Call]:
    """Returns the calls of a graph, by the position of their first operation."""
    ops = graph.body.ops
    keys = _Keys()
    numbers: dict[Hashable, int] = {}
    tokens = np.array([numbers.setdefault(keys.of(op.eqn), len(numbers)) for op in ops])
    last_reads = _last_reads(graph)
    calls: dict[int, _Call] = {}
    for found in _repetitions(tokens, 0, len(ops)):
        start = _narrowest(graph, found, last_reads)
        count = (found.end - start) // found.period
        for first, last in _segments(ops[start : start + found.period]):
            blocks = [range(at + first, at + last) for at in range(start, start + count * found.period, found.period)]
            calls |= _calls_of(graph, blocks, last_reads)
    return calls


def _repetitions(tokens: Any, start: int, end: int) -> Iterator[_Repetition]:
    """Yields the repetition that saves most among the operations from `start` to `end`, and those beside it."""
    order = np.argsort(tokens[start:end], kind="stable")
    distances = np.diff(order)[np.diff(tokens[start:end][order]) == 0]
    found = list[_Repetition]()
    for period, _ in Counter(distances.tolist()).most_common(PERIODS):
        if period >= LEAST:
            first, length = _longest_run(tokens[start : end - period] == tokens[start + period : end])
            found.append(_Repetition(start + first, start + first + length + period, period))
    best = max(found, key=lambda repetition: (repetition.saved, -repetition.period), default=None)
    if best is not None and best.saved > 0:
        yield from _repetitions(tokens, start, best.start)
        yield best
        yield from _repetitions(tokens, best.end, end)


def _longest_run(is_set: Any) -> tuple[int, int]:
    """Returns where the longest run of True begins, and its length."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_set, [False]])))
    starts = edges[::2]
    lengths = edges[1::2] - starts
    if not lengths.size:
        return 0, 0
    longest = lengths.argmax()
    return int(starts[longest]), int(lengths[longest])


def _last_reads(graph: Graph) -> dict[int, int]:
    """Returns the position of the last operation that reads each value; the number of operations for outputs."""
    reads = {value: position for position, op in enumerate(graph.body.ops) for value in op.inputs}
    return reads | dict.fromkeys(graph.body.outputs, len(graph.body.ops))


def _narrowest(graph: Graph, found: _Repetition, last_reads: Mapping[int, int]) -> int:
    """Returns the start in the first period at which the fewest values of a block are read after it."""

    def crossing(start: int) -> int:
        end = start + found.period
        values = (value for op in graph.body.ops[start:end] for value in op.outputs)
        return sum(last_reads.get(value, -1) >= end for value in values)

    # Without the last block if it would be incomplete: at least two are left.
    latest = min(found.start + found.period, found.end - 2 * found.period + 1)
    return min(range(found.start, latest), key=crossing)


def _segments(block: Sequence[Op]) -> Iterator[tuple[int, int]]:
    """Yields the first position and the end of each part of a block between operations that are no part of calls."""
    first = 0
    for position, op in enumerate((*block, None)):
        if op is None or op.name in RULED:
            if position - first >= LEAST:
                yield first, position
            first = position + 1


def _calls_of(graph: Graph, blocks: Sequence[range], last_reads: Mapping[int, int]) -> dict[int, _Call]:
    """Returns the calls of those blocks whose operations read the same among each other, by position."""
    groups: dict[Hashable, list[range]] = defaultdict(list)
    inputs = dict[range, tuple[int, ...]]()
    for block in blocks:
        wiring, inputs[block] = _wiring(graph, block)
        groups[wiring].append(block)
    calls = dict[int, _Call]()
    for equal in groups.values():
        values = [[value for at in block for value in graph.body.ops[at].outputs] for block in equal]
        is_read = [
            any(last_reads.get(value, -1) >= block.stop for value, block in zip(row, equal, strict=True))
            for row in zip(*values, strict=True)
        ]
        if len(equal) < 2 or not any(is_read):
            continue
        outputs = [tuple(compress(row, is_read)) for row in values]
        body = Body(inputs[equal[0]], outputs[0], graph.body.ops[equal[0].start : equal[0].stop])
        function = jax.jit(partial(_evaluate, graph.within(body)))
        calls |= {
            block.start: _Call(function, inputs[block], outs, block.stop)
            for block, outs in zip(equal, outputs, strict=True)
        }
    return calls


def _wiring(graph: Graph, block: range) -> tuple[Hashable, tuple[int, ...]]:
    """Returns which values the operands of a block are, up to their numbers, and the values from outside of it."""
    ops = graph.body.ops[block.start : block.stop]
    places: dict[int, Hashable] = {value: (at, i) for at, op in enumerate(ops) for i, value in enumerate(op.outputs)}
    inputs = list[int]()
    for value in (value for op in ops for value in op.inputs):
        if value not in places:
            constant = graph.constants.get(value)
            if _is_number(constant):
                places[value] = _number_key(constant)
            else:
                places[value] = len(inputs)
                inputs.append(value)
    return tuple(tuple(places[value] for value in op.inputs) for op in ops), tuple(inputs)


def _is_number(value: Any) -> bool:
    return isinstance(value, np.generic | bool | int | float | complex) or (
        isinstance(value, np.ndarray) and not value.ndim
    )


def _number_key(value: Any) -> Hashable:
    array = np.asarray(value)
    return type(value), array.dtype, array.tobytes()


@final
class _Keys:
    """Keys of equations, equal for those with the same primitive, parameters, types and source line."""

    def __init__(self) -> None:
        self._jaxprs: dict[int, tuple[Any, Hashable]] = {}
        self._lines: dict[Hashable, str] = {}

    def of(self, eqn: core.JaxprEqn) -> Hashable:
        """Returns the key of an equation; operands that are numbers are not part of it."""
        types = *(atom.aval for atom in eqn.invars), None, *(var.aval for var in eqn.outvars)
        if eqn.primitive.name in RULED:
            return eqn.primitive, types
        if eqn.effects:
            return id(eqn)
        params = tuple((name, self._param(value)) for name, value in eqn.params.items())
        return eqn.primitive, params, types, repr(eqn.ctx), str(eqn.source_info.name_stack), self._line(eqn)

    def _line(self, eqn: core.JaxprEqn) -> str:
        """Returns the source line of an equation; tracebacks with the same frames are equal."""
        traceback = eqn.source_info.traceback
        if traceback not in self._lines:
            self._lines[traceback] = source_line([eqn])
        return self._lines[traceback]

    def _param(self, value: Any) -> Hashable:
        """Returns the key of a parameter: of a jaxpr by its equations, of other values by type and equality."""
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            if id(value) not in self._jaxprs:
                self._jaxprs[id(value)] = value, self._of_jaxpr(value)  # the value is kept, and with it its id
            return self._jaxprs[id(value)][1]
        if isinstance(value, tuple | list):
            return type(value), tuple(map(self._param, value))
        try:
            hash(value)
        except TypeError:
            return id(value)
        return type(value), value

    def _of_jaxpr(self, closed: Any) -> Hashable:
        jaxpr, consts = opened(closed)
        numbers: dict[Any, int] = {}
        rows = list[Hashable]()

        def read(atom: Any) -> Hashable:
            return _number_key(atom.val) if isinstance(atom, core.Literal) else numbers[atom]

        for var in (*jaxpr.constvars, *jaxpr.invars):
            numbers[var] = len(numbers)
        for eqn in jaxpr.eqns:
            key = id(eqn) if eqn.primitive.name in RULED else self.of(eqn)
            rows.append((key, tuple(map(read, eqn.invars))))
            for var in eqn.outvars:
                numbers[var] = len(numbers)
        types = tuple(var.aval for var in (*jaxpr.constvars, *jaxpr.invars))
        return types, tuple(map(id, consts)), tuple(rows), tuple(map(read, jaxpr.outvars))
