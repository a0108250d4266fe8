"""How a TPU's compiler runs matmuls: products with a vector and of complex numbers, and operands in float32.

Source: programs of tests/byo for v5e:2x4, libtpu 0.0.52 (`spanax check --level 3`).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spanax.plan.spmd.divided_sums import num_divided
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.tiled_scatter import WORD_BYTES
from spanax.plan.spmd.tpu_convolutions import convolution_share
from spanax.trace.jaxpr.graph import Graph, Op

CONVOLUTION = "conv_general_dilated"

REAL_PRODUCTS = 3
"""Real matmuls of a complex one: (a + b i)(c + d i) is computed from ac, bd and (a + b)(c + d)."""

REAL_PARTS = frozenset({"real", "convert_element_type"})
"""Operations that read the real part of a complex value; JAX converts no complex value to another complex dtype."""

COMPLEX_PARTS = 2
"""Real numbers in a complex one."""

DEFAULT_PRECISION = (None, jax.lax.Precision.DEFAULT, (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT))
"""Precisions of a matmul in float32 for which a TPU rounds its operands to bfloat16."""


VIEWS = frozenset({"copy", "reshape", "squeeze", "transpose"})
"""Operations whose result has the elements of their operand."""

RENAMED = VIEWS | {"convert_element_type"}
"""Operations on each element of a sum, which commute with its reduction over devices up to rounding."""


def tpu_matmul(sharded: ShardedProgram, op: Op, row: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
    """Returns the row of `Matmuls` of an operation as a TPU runs it, and the number of matmuls that it runs."""
    share = convolution_share(sharded, op) if op.name == CONVOLUTION else computed_share(sharded.traced.graph, op)
    flops = row[0] * share / num_divided(sharded, op, sharded.division(op).partition)
    return (flops, *row[1:]), num_matmuls(sharded, op, row)


def num_matmuls(sharded: ShardedProgram, op: Op, row: Sequence[Any]) -> int:
    """Returns the number of matmuls that an operation runs on a TPU.

    A matmul with a vector, or over one product, is a multiplication and a sum and counts as none; a complex one counts
    as three, and as two, ac and bd, where only its real part is read.
    Source: openxla/xla xla/hlo/transforms/simplifiers/algebraic_simplifier.cc (`enable_dot_strength_reduction`).

    Args:
      sharded: the program's step under the layout, on a mesh with the sizes that it runs on.
      op: a matmul or convolution.
      row: its row of `Matmuls`: the sizes m, n and k are its third column, their mesh axes the fourth.
    """
    if op.name != "dot_general":
        return 1
    mesh = sharded.resolver.mesh
    for size, mask in zip(row[2][:3], row[3][:3], strict=True):
        if size <= mesh.ways([axis for bit, axis in enumerate(mesh.names) if mask >> bit & 1]):
            return 0
    graph, (result,) = sharded.traced.graph, op.outputs
    if not _is_complex(graph, result):
        return 1
    return REAL_PRODUCTS - 1 if _is_real_part(graph, result) else REAL_PRODUCTS


def computed_share(graph: Graph, op: Op) -> float:
    """Returns the share of a matmul's result that is computed: where only a slice of it is read, that slice.

    Example: the gradient of a concatenation of activations and inputs, of which the activations' part is used.
    Source: openxla/xla xla/hlo/transforms/simplifiers/algebraic_simplifier.cc (`HandleSlice`); tests/byo/nerf.py.
    """
    (value,) = op.outputs
    while op.name == "dot_general" and len(readers := graph.readers[value]) == 1 and value not in graph.body.outputs:
        (reader,) = readers
        parts = [part for part in reader.outputs if graph.readers[part] or part in graph.body.outputs]
        if reader.name in ("slice", "split") and len(parts) == 1:
            return math.prod(graph.shape(parts[0])) / math.prod(graph.shape(value))
        if reader.name not in RENAMED:
            break
        (value,) = reader.outputs
    return 1.0


def num_parts(graph: Graph, value: int) -> float:
    """Returns the factor by which the bytes of a value's partial sum grow: those of a complex matmul are three."""
    producer = graph.producers.get(value)
    is_complex_matmul = producer is not None and producer.name == "dot_general" and _is_complex(graph, value)
    return REAL_PRODUCTS / COMPLEX_PARTS if is_complex_matmul else 1.0


def is_gathered_sum(graph: Graph, value: int) -> bool:
    """Returns whether a sum over devices is gathered and added by each: complex sums are.

    Those of complex matmuls are sums of real matmuls. Source: 8 shapes in programs for v5e:2x4, libtpu 0.0.52.
    """
    producer = graph.producers.get(value)
    is_matmul = producer is not None and producer.name == "dot_general"
    return _is_complex(graph, value) and not is_matmul and bool(graph.shape(value))


def is_rounded(graph: Graph, value: int) -> bool:
    """Returns whether each reader of a float32 value rounds it to 16 bits: a TPU moves the rounded value."""
    return _is_rounded_by(graph, value, graph.readers[value])


def is_gathered_rounded(sharded: ShardedProgram, value: int) -> bool:
    """Returns whether a float32 value is gathered in 16 bits; elementwise readers of its shard need no gather."""
    graph = sharded.traced.graph
    readers = [op for op in graph.readers[value] if not op.is_elementwise or sharded.division(op).partition]
    return _is_rounded_by(graph, value, readers)


def _is_rounded_by(graph: Graph, value: int, readers: Sequence[Op]) -> bool:
    if graph.avals[value].dtype != np.float32 or not readers:
        return False
    return all(is_rounded(graph, op.outputs[0]) if op.name in VIEWS else _rounds(graph, op) for op in readers)


def _rounds(graph: Graph, op: Op) -> bool:
    """Returns whether an operation rounds its float32 operand to 16 bits: a conversion, or a matmul."""
    if op.name == "convert_element_type":
        dtype = graph.avals[op.outputs[0]].dtype
        return bool(jax.numpy.issubdtype(dtype, jax.numpy.floating)) and dtype.itemsize < WORD_BYTES
    if op.name != "dot_general" or op.params["precision"] not in DEFAULT_PRECISION:
        return False
    summed, passed = op.dim_map.contraction
    lhs, rhs = (graph.shape(value) for value in op.inputs[:2])
    num_products = math.prod(lhs[dim] for dim, _ in summed)
    rows = math.prod(lhs[dim] for dim, other, _ in passed if dim >= 0 and other < 0)
    columns = math.prod(rhs[dim] for other, dim, _ in passed if dim >= 0 and other < 0)
    return min(num_products, rows, columns) > 1


def _is_real_part(graph: Graph, value: int) -> bool:
    """Returns whether only the real part of a complex value is read."""
    readers = graph.readers[value]
    return bool(readers) and value not in graph.body.outputs and all(op.name in REAL_PARTS for op in readers)


def _is_complex(graph: Graph, value: int) -> bool:
    return bool(np.issubdtype(graph.avals[value].dtype, np.complexfloating))
