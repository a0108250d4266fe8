"""Finds the dims that scans iterate along, also through transposes and elementwise operations."""

import math
from collections.abc import Iterator, Mapping, Sequence

from spanax.trace.jaxpr.dim_maps.relations import Dim, Family, Kind
from spanax.trace.jaxpr.graph import Graph, Op, scan_counts


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
    operands = list[Dim]()
    results = list[Dim]()
    for op in graph.ops():
        if op.name == "scan":
            operands += [(value, 0) for value in op.inputs[sum(scan_counts(graph, op)) :]]
            results += [(value, 0) for value in op.outputs[scan_counts(graph, op)[1] :]]
    producers = {value: [op] for value, op in graph.producers.items()}
    return _followed(graph, operands, producers, is_back=True) | _followed(graph, results, graph.readers, is_back=False)


def _followed(graph: Graph, stack: list[Dim], ops: Mapping[int, Sequence[Op]], *, is_back: bool) -> set[Dim]:
    """Returns dims, and those of other values whose rows are the same, transposed or computed elementwise."""
    followed = set[Dim]()
    while stack:
        value, dim = entry = stack.pop()
        if entry not in followed:
            followed.add(entry)
            for op in ops.get(value, ()):
                related = _same_dims(graph, op, value, dim)
                stack += [entry for entry in related if entry[0] in (op.inputs if is_back else op.outputs)]
    return followed


def _same_dims(graph: Graph, op: Op, value: int, dim: int) -> Iterator[Dim]:
    """Yields the dims of other values whose rows are those of a value, transposed or computed elementwise."""
    values = (*op.inputs, *op.outputs)
    if op.is_elementwise or op.family is Family.VIEW:
        for relation in op.dim_map.of_kind(Kind.SAME):
            dims = [(values[array], dim) for array, dim in relation.dims]
            same_size = ((v, d) for v, d in dims if math.prod(graph.shape(v)) == math.prod(graph.shape(value)))
            yield from same_size if (value, dim) in dims else ()
