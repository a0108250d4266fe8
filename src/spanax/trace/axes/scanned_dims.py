"""Finds the dims that scans iterate along, also through transposes and elementwise operations."""

from collections.abc import Iterator

from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.graph import Graph, Op, scan_counts

Dim = tuple[int, int]
"""A value and one of its dims."""


def scanned_dims(graph: Graph) -> set[Dim]:
    """Returns the dims of scanned operands and stacked results, also through transposes and elementwise ops.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> def parts(x):
      ...     return jax.lax.scan(lambda total, part: (total + part.sum(), None), 0.0, jnp.exp(x).reshape(4, 2))[0]
      >>> graph = from_jaxpr(jax.make_jaxpr(parts)(jax.ShapeDtypeStruct((8,), "float32")))
      >>> reshapes = [op.outputs[0] for op in graph.body.ops if op.name == "reshape"]
      >>> scanned_dims(graph) == {(reshapes[0], 0)}
      True
    """
    operands, results = list[Dim](), list[Dim]()
    for op in graph.ops():
        if op.name == "scan":
            operands += [(value, 0) for value in op.inputs[sum(scan_counts(graph, op)) :]]
            results += [(value, 0) for value in op.outputs[scan_counts(graph, op)[1] :]]
    operand_dims = set[Dim]()
    while operands:
        value, dim = entry = operands.pop()
        if entry not in operand_dims:
            operand_dims.add(entry)
            operands += _operands(graph, graph.producers[value], dim) if value in graph.producers else ()
    result_dims = set[Dim]()
    while results:
        value, dim = entry = results.pop()
        if entry not in result_dims:
            result_dims.add(entry)
            results += [result for op in graph.readers[value] for result in _results(graph, op, value, dim)]
    return operand_dims | result_dims


def _operands(graph: Graph, op: Op, dim: int) -> Iterator[Dim]:
    if op.name == "transpose":
        yield op.inputs[0], op.params["permutation"][dim]
    elif op.name in ELEMENTWISE:
        yield from ((value, dim) for value in op.inputs if graph.shape(value) == graph.shape(op.outputs[0]))


def _results(graph: Graph, op: Op, value: int, dim: int) -> Iterator[Dim]:
    if op.name == "transpose":
        yield op.outputs[0], op.params["permutation"].index(dim)
    elif op.name in ELEMENTWISE and graph.shape(value) == graph.shape(op.outputs[0]):
        yield op.outputs[0], dim
