"""Live ranges: the first and last operation of a body for which each value is in memory, for any layout.

A value is live from the kernel that writes it to the last kernel that reads it. A value inside a fused kernel takes no
memory.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spanax.trace.analysis.fusion import ALIASES, Kept
from spanax.trace.analysis.sharding_keys import ShardingKey
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op
from spanax.trace.traced import Traced

SCATTERS = ("scatter-add", "scatter_add")


@dataclass(frozen=True, eq=False)
class Liveness:
    """The live ranges of one body, with an entry per stored value, grouped by sharding key and item size.

    Attributes:
      first: index of its producer in execution order; 0 for inputs.
      last: index of its last consumer; the number of operations for outputs.
      group: index of its group.
      values: a value of each group.
      num_bytes: the global bytes of a value of each group.
    """

    first: np.ndarray
    last: np.ndarray
    group: np.ndarray
    values: tuple[int, ...]
    num_bytes: np.ndarray


def liveness(
    traced: Traced,
    stored: Mapping[Body, Kept],
    order: Mapping[Body, Sequence[Op]],
    keys: Sequence[ShardingKey],
    *,
    in_matmuls: bool,
) -> dict[Body, Liveness]:
    """Returns the live ranges of every body of a traced function.

    State and batch are always live, and the updated state reuses their buffers: none of them is included.

    Args:
      traced: the train step.
      stored: for every body, the values stored in memory between kernels.
      order: for every body, its operations in execution order.
      keys: the sharding key of every value, by index.
      in_matmuls: whether the compiler fuses producers into matmuls that are their only consumers, and recomputes
        constants in their consumers. On TPU it does; on GPU, matmuls are library calls and read from memory.

    Source: the buffers of steps compiled for TPUs, tests/data/truth/aot_probe.csv, and for both, docs/check.md.
    """
    graph = traced.graph
    inputs = traced.graph.body.inputs
    excluded = {*inputs, *graph.body.outputs[: traced.num_state]}
    if in_matmuls:
        excluded.update(value for value, origin in enumerate(traced.axes.origins) if not origin)
    ranges = dict[Body, Liveness]()
    for body, plan in stored.items():
        in_memory, last = _last_reads(graph, body, plan, order[body], in_matmuls)
        ranges[body] = _of_body(graph, body, order[body], in_memory - excluded, last, keys)
    return ranges


def _of_body(
    graph: Graph,
    body: Body,
    ops: Sequence[Op],
    stored: set[int],
    last: Mapping[int, int],
    keys: Sequence[ShardingKey],
) -> Liveness:
    groups: dict[tuple[int, int, bool], int] = {}
    values = list[int]()
    sizes = list[float]()
    rows = list[tuple[int, int, int]]()
    candidates = [(0, value) for value in body.inputs]
    candidates += [(index, value) for index, op in enumerate(ops) for value in op.outputs if value in last]
    for index, value in candidates:
        # A loop writes the offloaded results of its body into those of the loop.
        if value not in stored or (value in body.outputs and graph.is_on_host(value)):
            continue
        aval = graph.avals[value]
        itemsize = getattr(aval.dtype, "itemsize", 4)
        is_offloaded = index > 0 and graph.is_on_host(value)  # a loop copies the inputs of its body to the device
        group = groups.setdefault((keys[value].number, itemsize, is_offloaded), len(groups))
        if group == len(values):
            values.append(value)
            sizes.append(float(math.prod(aval.shape)) * itemsize)
        rows.append((index, max(index, last.get(value, len(ops))), group))
    table = np.asarray(rows, int).reshape(-1, 3).T
    return Liveness(table[0], table[1], table[2], tuple(values), np.asarray(sizes))


def _last_reads(
    graph: Graph, body: Body, plan: Kept, ops: Sequence[Op], in_matmuls: bool
) -> tuple[set[int], dict[int, int]]:
    """Returns the values of a body that are stored, and the last consumer of each.

    A scatter of one element into each row of zeros, as in the gradient of a cross-entropy, is fused into its consumers.
    """
    readers: dict[int, set[str]] = defaultdict(set)
    for op in ops:
        for value in () if op.name in ALIASES else op.inputs:
            readers[plan.of(value)].add(op.name)
    for value in body.outputs:
        readers[plan.of(value)].add("")
    last = dict(plan.last_reads(ops))
    fused = set[int]()
    for op in ops:
        for value in op.outputs:
            if in_matmuls and value in plan.written and readers[value] and readers[value] <= CONTRACTIONS:
                fused.add(value)
                last |= {operand: max(last.get(operand, 0), last.get(value, 0)) for operand in plan.sources(value)}
        if op.name in SCATTERS and op.params["dimension_numbers"].operand_batching_dims:
            if graph.shape(plan.of(op.inputs[0])) == ():
                fused.update(op.outputs)
    return plan.kept - fused, last
