"""Random batches for a program: normally distributed floats, and integers that are valid indices."""

from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import numpy as np

from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.index_arrays import IndexArrays
from spanax.trace.jaxpr.provenance import propagated
from spanax.trace.program import Program

FOLLOWED = frozenset({Family.ELEMENTWISE, Family.VIEW, Family.REORDER, Family.RESIZE, Family.DYNAMIC_SLICE})
"""Operations whose results are indices if an operand is."""

INDEXED = frozenset({Family.GATHER, Family.SCATTER, Family.SCATTER_ADD})


def example_batch(program: Program, seed: int) -> Any:
    """Returns a random batch that is determined by the seed.

    Floats are normally distributed. Integers are uniform below the size of the smallest table that they index and of
    the smallest range (`iota`) that they are compared with; without either, they are 0 or 1.
    """
    rng = np.random.default_rng(seed)
    bounds = index_bounds(program)
    arrays = []
    for leaf in program.batch:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            seeds = rng.integers(0, 1 << 31, leaf.shape)
            arrays.append(jax.vmap(jax.random.key)(seeds.ravel()).reshape(leaf.shape))
            continue
        dtype = np.dtype(leaf.dtype)
        if np.issubdtype(dtype, np.integer):
            arrays.append(rng.integers(0, bounds[leaf.path], leaf.shape).astype(dtype))
        elif dtype == np.bool_:
            arrays.append(rng.integers(0, 2, leaf.shape).astype(dtype))
        else:
            arrays.append(rng.standard_normal(leaf.shape).astype(dtype))
    return jax.tree.unflatten(program.batch_treedef, arrays)


def index_bounds(program: Program) -> dict[str, int]:
    """Returns the smallest size that the integers of each batch leaf index, by path; 2 if they index nothing."""
    graph = program.step.graph
    pairs = zip(program.batch, graph.body.inputs[len(program.leaves) :], strict=True)
    inputs = {value: leaf.path for leaf, value in pairs if jax.dtypes.issubdtype(leaf.dtype, np.integer)}
    follows = propagated(graph, {value: 1 << place for place, value in enumerate(inputs)}, partial(_followed, graph))
    arrays = IndexArrays(graph)
    bounds: dict[str, list[int]] = {path: [] for path in inputs.values()}
    for op in graph.ops():
        for value in op.inputs:
            sizes = _sizes(arrays, op, value) if follows[value] else ()
            for place, path in enumerate(bounds):
                bounds[path] += sizes if follows[value] >> place & 1 else ()
    return {path: min(sizes, default=2) for path, sizes in bounds.items()}


def _followed(graph: Graph, op: Op, operands: list[int]) -> int:
    """Returns the bits of the leaves whose integers are the results of an operation, given those of its operands."""
    is_integer = all(jax.dtypes.issubdtype(graph.avals[value].dtype, np.integer) for value in op.outputs)
    return reduce(or_, operands, 0) if op.family in FOLLOWED and is_integer else 0


def _sizes(arrays: IndexArrays, op: Op, value: int) -> list[int]:
    """Returns the sizes that an operand of an operation indexes, if it does."""
    if op.family in INDEXED and op.inputs[1] == value:
        numbers = op.params["dimension_numbers"]
        dims = numbers.start_index_map if op.family is Family.GATHER else numbers.scatter_dims_to_operand_dims
        # Batching dims are indexed implicitly, so only the dims in the start index map have bounds.
        return [arrays.graph.shape(op.inputs[0])[dim] for dim in dims]
    others = [each for each in op.inputs if each != value] if op.name in ("eq", "ne") else []
    options = [elements for each in others if (elements := arrays.elements(each, {})) is not None]
    return [int(elements.max()) + 1 for elements in options if any(elements.strides)]
