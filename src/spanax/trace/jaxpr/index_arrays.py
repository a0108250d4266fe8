"""Evaluates arrays of indices with NumPy: integers that are computed of positions, and of nothing else.

No device is needed, so a plan can know which rows an operation reads.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from spanax.trace.jaxpr.graph import Graph, Op, scan_counts


def _quotient(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "copy": lambda x: x,
    "div": _quotient,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.bitwise_not,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "select_n": lambda which, first, second: np.where(which, second, first),
    "sign": np.sign,
    "stop_gradient": lambda x: x,
    "sub": np.subtract,
}
"""The operations on elements of integers, by primitive."""


@functools.lru_cache(maxsize=16)
def repeated(number: int, size: int) -> np.ndarray:
    """Returns an array of one number; the same one for equal arguments."""
    return np.full(size, number, np.int32)


@functools.lru_cache(maxsize=16)
def indices(size: int, parts: int) -> np.ndarray:
    """Returns, for each of so many positions, which of equal parts it is in; the same array for equal arguments."""
    return np.arange(size, dtype=np.int64) * parts // size


VIEWS = frozenset({"broadcast_in_dim", "concatenate", "convert_element_type", "iota", "reshape", "squeeze"})
"""The operations that keep the order of elements, and those that create positions."""


class IndexArrays:
    """The values of a graph that are computed of positions; equal computations of one array are evaluated once."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._evaluated = dict[tuple[object, ...], np.ndarray]()
        self._operands_of = dict[tuple[object, ...], Sequence[np.ndarray]]()

    @cached_property
    def _equal(self) -> dict[int, int]:
        return dict(_equal_values(self.graph))

    def source(self, value: int, passed: set[int] | None = None) -> int:
        """Returns the value that `value` equals outside of a loop, or in the same iteration of another loop.

        A loop that reads what another one has stacked takes the elements of the same iteration. A carry is its own
        source. `passed` receives the values on the way, with both ends.
        """
        chain = [value]
        while chain[-1] in self._equal:
            chain.append(self._equal[chain[-1]])
        while len(self.graph.shape(chain[-1])) != len(self.graph.shape(value)):  # stacked by something else
            chain.pop()
        if passed is not None:
            passed.update(chain)
        return chain[-1]

    def elements(self, value: int, known: Mapping[int, np.ndarray]) -> np.ndarray | None:
        """Returns the elements of a value that is computed of `known` sources and of positions; None for any other.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from spanax.trace.jaxpr.graph import from_jaxpr
          >>> graph = from_jaxpr(jax.make_jaxpr(lambda order: order // 2 + jnp.arange(4))(jnp.arange(4)))
          >>> known = {graph.body.inputs[0]: np.array([3, 2, 1, 0])}
          >>> IndexArrays(graph).elements(graph.body.outputs[0], known).tolist()
          [1, 2, 2, 3]
        """
        values = dict(known)
        last = self.source(value)
        pending = [last]
        while pending:
            number = pending[-1]
            if number not in values:
                operands = self._operands(number)
                if operands is None:
                    return None
                if missing := [each for each in operands if each not in values]:
                    pending += missing
                    continue
                values[number] = self._computed(number, [values[each] for each in operands])
            pending.pop()
        return values[last]

    def leaves(self, value: int) -> set[int]:
        """Returns the sources that an array of indices is computed of: values that are no function of positions."""
        found = set[int]()
        seen = set[int]()
        pending = [self.source(value)]
        while pending:
            number = pending.pop()
            if number not in seen:
                seen.add(number)
                operands = self._operands(number)
                pending += operands or ()
                if operands is None:
                    found.add(number)
        return found

    def are_equal(self, first: int, second: int) -> bool:
        """Returns whether two values are the same computation of equal values, such as one that a remat repeats."""
        seen = set[tuple[int, int]]()
        pending = [(first, second)]
        while pending:
            a, b = map(self.source, pending.pop())
            if a == b or (a, b) in seen:
                continue
            seen.add((a, b))
            one, other = (self.graph.producers.get(value) for value in (a, b))
            if one is None or other is None:
                constants = [self.graph.constants.get(value) for value in (a, b)]
                if one or other or not all(isinstance(each, int | float | np.generic) for each in constants):
                    return False
                if constants[0] != constants[1]:
                    return False
                continue
            if one.bodies or other.bodies or one.eqn.effects or one.name != other.name:
                return False
            if one.outputs.index(a) != other.outputs.index(b) or not _same_params(one, other):
                return False
            pending += zip(one.inputs, other.inputs, strict=True)
        return True

    def are_all(self, value: int, element: int) -> bool:
        """Returns whether all elements of a value are one number."""
        elements = self.elements(value, {})
        return elements is not None and not any(elements.strides) and bool(np.all(elements == element))

    def _operands(self, number: int) -> list[int] | None:
        """Returns the sources that a value is computed of; None if it is no function of positions."""
        op = self.graph.producers.get(number)
        if op is None:
            constant = self.graph.constants.get(number)
            is_scalar = isinstance(constant, int | float | np.generic | np.ndarray) and not np.ndim(constant)
            return [] if is_scalar else None
        if op.name not in VIEWS and (op.name not in ELEMENTWISE or (op.name == "select_n" and len(op.inputs) != 3)):
            return None
        return [self.source(each) for each in op.inputs]

    def _computed(self, number: int, ins: Sequence[np.ndarray]) -> np.ndarray:
        op = self.graph.producers.get(number)
        if op is None:
            constant = np.asarray(self.graph.constants[number])
            return self._evaluated.setdefault((constant.dtype, constant.item()), constant)
        aval = op.eqn.outvars[0].aval
        dims = (op.params.get("dimension"), op.params.get("broadcast_dimensions"))
        key = (op.name, aval.shape, aval.dtype, dims, *map(id, ins))
        if key not in self._evaluated:
            self._operands_of[key] = ins  # what an id stands for stays alive
            self._evaluated[key] = _evaluated(op, ins)
        return self._evaluated[key]


def _equal_values(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yields inputs of bodies and results of loops, each with the value that it equals."""
    for op in graph.ops():
        if op.bodies and op.name not in ("while", "cond"):
            wires = graph.wires(op)
            carried = {value for pair in wires.carried for value in pair}
            yield from ((inner, outer) for outer, inner in wires.inputs if inner not in carried)
            yield from wires.outputs[scan_counts(graph, op)[1] if op.name == "scan" else 0 :]


def _same_params(one: Op, other: Op) -> bool:
    """Returns whether the parameters of two operations of one primitive are equal; those of other types are not."""
    try:
        return bool(one.params == other.params)
    except (TypeError, ValueError):
        return False


def _evaluated(op: Op, ins: Sequence[np.ndarray]) -> np.ndarray:
    aval = op.eqn.outvars[0].aval
    if op.name == "iota":
        dim = op.params["dimension"]
        shape = [-1 if each == dim else 1 for each in range(len(aval.shape))]
        return np.broadcast_to(np.arange(aval.shape[dim], dtype=aval.dtype).reshape(shape), aval.shape)
    if op.name == "broadcast_in_dim":
        sizes = dict(zip(op.params["broadcast_dimensions"], ins[0].shape, strict=True))
        return np.broadcast_to(ins[0].reshape([sizes.get(dim, 1) for dim in range(len(aval.shape))]), aval.shape)
    if op.name in ("reshape", "squeeze"):
        return ins[0].reshape(aval.shape)
    if op.name == "convert_element_type":
        return ins[0].astype(aval.dtype, copy=False)
    if op.name == "concatenate":
        return np.concatenate(ins, op.params["dimension"])
    return np.asarray(ELEMENTWISE[op.name](*ins)).astype(aval.dtype, copy=False)
