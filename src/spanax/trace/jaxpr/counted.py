"""Shows that an array has the numbers of times that each of several options is chosen."""

from dataclasses import dataclass

import numpy as np

from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.index_arrays import IndexArrays

CHOOSING = {"top_k": 1, "argmax": 0}
"""The primitives that choose, each with the position of its indices among its results."""

RENAMED = frozenset({"convert_element_type", "copy", "reshape", "squeeze", "stop_gradient"})
"""Operations between counts and their use."""


@dataclass(frozen=True)
class Counts:
    """An operation that counts.

    Attributes:
      op: the operation: a scatter of ones, or a sum of one-hots.
      values: its result and what is equal to it, up to where the counts are used.
      keys: the value whose elements it counts.
      is_repeated: whether the last dim of `keys` repeats each element for every option.
    """

    op: Op
    values: frozenset[int]
    keys: int
    is_repeated: bool


@dataclass(frozen=True)
class Choices:
    """The indices of what a top-k or an argmax chooses, among `number` options: `each` different ones at a time."""

    value: int
    number: int
    each: int


def chosen_dim(op: Op) -> int:
    """Returns the dim of its operand along which an operation of `CHOOSING` chooses."""
    axes: tuple[int, ...] = op.params.get("axes", (op.params.get("axis", -1),))
    return axes[0]


def choices_of(arrays: IndexArrays, keys: int) -> Choices | None:
    """Returns the choices that keys are a function of; None if they are of anything else, too."""
    leaves = arrays.leaves(keys)
    value = next(iter(leaves), -1)
    op = arrays.graph.producers.get(value)
    if len(leaves) != 1 or op is None or op.outputs.index(value) != CHOOSING.get(op.name):
        return None
    dim = chosen_dim(op)
    each = arrays.graph.shape(value)[dim] if op.name == "top_k" else 1
    return Choices(value, arrays.graph.shape(op.inputs[0])[dim], each)


def counts_of(arrays: IndexArrays, sizes: int) -> Counts | None:
    """Returns the operation that computes counts; None if they are no counts of equal elements."""
    graph = arrays.graph
    passed = set[int]()
    op = graph.producers.get(arrays.source(sizes, passed))
    while op is not None and op.name in RENAMED and graph.shape(op.inputs[0]) == graph.shape(sizes):
        op = graph.producers.get(arrays.source(op.inputs[0], passed))
    if op is not None and op.family is Family.SCATTER_ADD:
        zeros, indices, ones = op.inputs[:3]
        numbers = op.params["dimension_numbers"]
        is_plain = not numbers.operand_batching_dims and not numbers.update_window_dims
        is_count = arrays.are_all(zeros, 0) and arrays.are_all(ones, 1) and len(graph.shape(zeros)) == 1
        return Counts(op, frozenset(passed), indices, False) if is_plain and is_count else None
    keys = None if op is None or op.name != "reduce_sum" else _compared(arrays, op)
    return None if op is None or keys is None else Counts(op, frozenset(passed), keys, True)


def _compared(arrays: IndexArrays, op: Op) -> int | None:
    """Returns the operand of a comparison with all options, of which an operation sums the results."""
    graph = arrays.graph
    (number,) = graph.shape(op.outputs[0]) or (0,)
    while op.name == "reduce_sum" or op.name == "convert_element_type":
        rank = len(graph.shape(op.inputs[0]))
        producer = graph.producers.get(arrays.source(op.inputs[0]))
        if producer is None or (op.name == "reduce_sum" and rank - 1 in op.params["axes"]):
            return None
        op = producer
    for operand, other in (op.inputs, op.inputs[::-1]) if op.name == "eq" else ():
        options = arrays.elements(other, {})
        if options is not None and options.shape[-1] == number and not any(options.strides[:-1]):
            return operand if np.array_equal(options.reshape(-1, number)[0], np.arange(number)) else None
    return None


def count_keys(arrays: IndexArrays, counts: Counts, keys: int, choices: Choices) -> bool:
    """Returns whether counts are of keys, in their order, for all choices."""
    graph = arrays.graph
    counted = choices_of(arrays, counts.keys)
    if counted is None or not (counted.value == choices.value or arrays.are_equal(counted.value, choices.value)):
        return False
    shape = graph.shape(choices.value)
    size = int(np.prod(shape))
    for start in range(0, choices.number, size):
        some = (start + np.arange(size)) % choices.number
        chosen = some.astype(graph.avals[choices.value].dtype).reshape(shape)
        elements = arrays.elements(counts.keys, {counted.value: chosen})
        expected = arrays.elements(keys, {choices.value: chosen})
        if elements is None or expected is None or (counts.is_repeated and elements.strides[-1]):
            return False
        if not np.array_equal(elements[..., 0].ravel(), expected.ravel()):
            return False
    return True
