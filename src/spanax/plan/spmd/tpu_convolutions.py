"""What a TPU's compiler changes in a convolution: explicit padding becomes its own, and few examples become more.

With fewer than 8 examples per device, the last spatial dim is divided into 8 overlapping parts, which become examples
("space to batch"): padding to equal parts is computed as well. Source: 23 convolutions compiled by libtpu 0.0.52 for
v5e:2x2 and tests/byo/unet.py, cnn.py and wavenet.py for v5e:2x4 (input and result shapes in the programs); the
arithmetic of openxla/xla xla/service/space_to_batch_converter.cc. A convolution is rated by itself: parts that the
compiler keeps from one convolution to the next are not modeled.
"""

import math
from typing import Any

from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.analysis.op_groups import num_valid_positions
from spanax.trace.jaxpr.graph import Graph, Op

PARTS = 8
"""Parts of the last spatial dim, and the examples per device from which on it is not divided."""


def convolution_share(sharded: ShardedProgram, op: Op) -> float:
    """Returns the FLOPs of a convolution on a TPU over those of its traced form, on a mesh with its sizes."""
    partition = sharded.division(op).partition
    graph, numbers = sharded.traced.graph, op.params["dimension_numbers"]
    lhs, rhs, out = (graph.shape(value) for value in (*op.inputs[:2], op.outputs[0]))
    dims = [*zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)]
    if partition is None or not dims:
        return 1.0
    mesh, mask = sharded.resolver.mesh, partition.operands[0][numbers.lhs_spec[0]]
    batch = lhs[numbers.lhs_spec[0]] / mesh.ways([axis for bit, axis in enumerate(mesh.names) if mask >> bit & 1])
    share = 1.0
    for index, (of_lhs, of_rhs, of_out) in enumerate(dims):
        stride, padding = op.params["window_strides"][index], op.params["padding"][index]
        dilations = op.params["lhs_dilation"][index], op.params["rhs_dilation"][index]
        size, window, positions = lhs[of_lhs], rhs[of_rhs], out[of_out]
        traced = num_valid_positions(size, window, positions, stride, padding[0], *dilations)
        low, high = _explicit_padding(graph, op, of_lhs)
        size, padding = size - low - high, (padding[0] + low, padding[1] + high)
        computed = num_valid_positions(size, window, positions, stride, padding[0], *dilations)
        part = _part(size + sum(padding), positions, stride)
        is_plain = dilations == (1, 1) and op.params["batch_group_count"] == 1
        if is_plain and index == len(dims) - 1 and batch < PARTS and part >= window > 1:
            computed = PARTS * part // stride * window
        share *= computed / max(traced, 1)
    return share


def _part(padded: int, positions: int, stride: int) -> int:
    """Returns the input positions of a part, without those that it shares with the next."""
    part = math.ceil(positions / PARTS) * stride
    while part * PARTS < padded:
        part += stride
    return part


def _explicit_padding(graph: Graph, op: Op, dim: int) -> tuple[int, int]:
    """Returns the zeros that an operation before a convolution adds to a spatial dim."""
    producer = graph.producers.get(graph.origin(op.inputs[0], ("convert_element_type",)))
    if producer is None or producer.name != "pad" or min(op.params["lhs_dilation"]) > 1:
        return 0, 0
    low, high, interior = producer.params["padding_config"][dim]
    fill: Any = graph.constants.get(graph.origin(producer.inputs[1], ("convert_element_type",)))
    is_zero = fill is not None and float(fill) == 0
    return (low, high) if is_zero and interior == 0 and min(low, high) >= 0 else (0, 0)
