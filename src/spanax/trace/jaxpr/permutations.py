"""The graph of a step without what JAX computes in case that indices repeat, where they are those of a sort.

The derivative of a scatter finds out which of equal indices wins: it scatters the number of each update, and reads it
back. Where the indices are a permutation, every number is read back.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import Body, Graph, Op, from_jaxpr
from spanax.trace.jaxpr.index_arrays import IndexArrays


def step_graph(jaxpr: Any) -> Graph:
    """Returns the graph of a step's jaxpr, in which the updates of a scatter by a permutation are not selected.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def put_back(rows, keys):
      ...   return jnp.zeros(4).at[jnp.argsort(keys)].set(rows)
      >>> jaxpr = jax.make_jaxpr(lambda rows, keys: jax.jvp(lambda x: put_back(x, keys), [rows], [rows])[1])
      >>> [op.name for op in step_graph(jaxpr(jnp.ones(4), jnp.arange(4))).ops() if op.name in ("scatter", "eq")]
      []
    """
    graph = from_jaxpr(jaxpr)
    arrays = IndexArrays(graph)
    equal = dict(_selected(arrays))
    return _replaced(graph, equal) if equal else graph


def _selected(arrays: IndexArrays) -> Iterator[tuple[int, int]]:
    """Yields selected values, each with the operand that it equals."""
    graph = arrays.graph
    for op in graph.ops():
        test = graph.producers.get(op.inputs[0]) if op.name == "select_n" and len(op.inputs) == 3 else None
        tables = [] if test is None or test.name != "eq" else [_table(graph, value) for value in test.inputs]
        if any(table is not None and _is_permuted(arrays, table) for table in tables):
            assert test is not None
            if _are_read_back(graph, test):
                yield op.outputs[0], op.inputs[2]
            elif all(arrays.are_all(value, 0) for value in op.inputs[1:]):
                yield op.outputs[0], op.inputs[1]


def _table(graph: Graph, value: int) -> Op | None:
    """Returns the scatter whose result is a value, or is read by it."""
    op = graph.producers.get(value)
    if op is not None and op.family is Family.GATHER:
        op = graph.producers.get(op.inputs[0])
    return op if op is not None and op.name == "scatter" else None


def _are_read_back(graph: Graph, test: Op) -> bool:
    """Returns whether a comparison is of the updates of a scatter and what is read where they were written."""
    for updates, value in (test.inputs, test.inputs[::-1]):
        read = graph.producers.get(value)
        table = _table(graph, value)
        if read is None or read.family is not Family.GATHER or table is None:
            continue
        numbers = read.params["dimension_numbers"]
        written = table.params["dimension_numbers"]
        dims = (numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map)
        others = (written.update_window_dims, written.inserted_window_dims, written.scatter_dims_to_operand_dims)
        if (*table.inputs[1:], dims) == (read.inputs[1], updates, others):
            return graph.shape(updates) == graph.shape(value)
    return False


def _is_permuted(arrays: IndexArrays, op: Op) -> bool:
    """Returns whether the indices of a scatter are the rows of its table in the order of a sort."""
    graph = arrays.graph
    numbers = op.params["dimension_numbers"]
    if numbers.operand_batching_dims or len(dims := numbers.scatter_dims_to_operand_dims) != 1:
        return False
    size = graph.shape(op.inputs[0])[dims[0]]
    leaves = arrays.leaves(op.inputs[1])
    order = next(iter(leaves), -1)
    sort = graph.producers.get(order)
    if len(leaves) != 1 or sort is None or sort.name != "sort" or graph.shape(order) != (size,):
        return False
    before = arrays.elements(sort.inputs[sort.outputs.index(order)], {})
    after = arrays.elements(op.inputs[1], {order: np.arange(size)})
    rows = np.arange(size)
    return all(each is not None and np.array_equal(each.ravel(), rows) for each in (before, after))


def _replaced(graph: Graph, equal: Mapping[int, int]) -> Graph:
    """Returns a graph that reads other values in place of some, without what only these were computed for."""

    def final(value: int) -> int:
        while value in equal:
            value = equal[value]
        return value

    def read(body: Body) -> Body:
        ops = [op for op in body.ops if not any(value in equal for value in op.outputs)]
        inputs = [replace(op, inputs=(*map(final, op.inputs),), bodies=(*map(read, op.bodies),)) for op in ops]
        return replace(body, outputs=(*map(final, body.outputs),), ops=(*inputs,))

    def live(body: Body) -> Body:
        needed = {*body.outputs}
        ops = list[Op]()
        for op in reversed(body.ops):
            if op.bodies or op.eqn.effects or not needed.isdisjoint(op.outputs):
                needed |= {*op.inputs}
                ops.append(replace(op, bodies=(*map(live, op.bodies),)) if op.bodies else op)
        return replace(body, ops=(*reversed(ops),))

    marks = {name: final(value) for name, value in graph.marks.items()}
    return replace(graph, body=live(read(graph.body)), marks=marks)
