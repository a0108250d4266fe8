"""Random batches for a program: normally distributed floats, and integers that are valid indices."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import Body, Graph, Op
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
    inputs = graph.body.inputs[len(program.leaves) :]
    bounds = {}
    for leaf, value in zip(program.batch, inputs, strict=True):
        if jax.dtypes.issubdtype(leaf.dtype, np.integer):
            sizes: list[int] = []
            _follow(graph, graph.body, {value}, {}, sizes)
            bounds[leaf.path] = min(sizes, default=2)
    return bounds


def _follow(graph: Graph, body: Body, indices: set[int], ranges: dict[int, int], sizes: list[int]) -> None:
    """Appends to `sizes` the sizes that values in `indices` index; extends `indices` and `ranges` by derived values."""
    for op in body.ops:
        if op.name == "iota":
            ranges[op.outputs[0]] = op.params["shape"][op.params["dimension"]]
        sizes += _sizes(graph, op, indices, ranges)
        if op.bodies:
            for outer, inner in graph.wires(op).inputs:
                if outer in indices:
                    indices.add(inner)
            for inner_body in op.bodies:
                _follow(graph, inner_body, indices, ranges, sizes)
            continue
        is_integer = all(jax.dtypes.issubdtype(graph.avals[value].dtype, np.integer) for value in op.outputs)
        if op.family in FOLLOWED and is_integer:
            indices.update(op.outputs if indices.intersection(op.inputs) else ())
            operand_ranges = [ranges[value] for value in op.inputs if value in ranges]
            ranges.update(
                dict.fromkeys(op.outputs, operand_ranges[0])
                if operand_ranges and not indices.intersection(op.inputs)
                else {}
            )


def _sizes(graph: Graph, op: Op, indices: set[int], ranges: Mapping[int, int]) -> list[int]:
    if op.family in INDEXED and op.inputs[1] in indices:
        numbers = op.params["dimension_numbers"]
        dims = numbers.start_index_map if op.family is Family.GATHER else numbers.scatter_dims_to_operand_dims
        # Batching dims are indexed implicitly, so only the dims in the start index map have bounds.
        return [graph.shape(op.inputs[0])[dim] for dim in dims]
    if op.name in ("eq", "ne") and indices.intersection(op.inputs):
        return [ranges[value] for value in op.inputs if value in ranges]
    return []
