"""Live ranges: from which to which operation of a body each value is in memory, for any layout.

A value lives from the kernel that writes it to the last kernel that reads it. A value inside a fused kernel takes no
memory.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spanax.trace.analysis.fusion import ALIASES
from spanax.trace.jaxpr.graph import Body, Op

if TYPE_CHECKING:
    from spanax.trace.traced import Traced

SCATTERS = ("scatter-add", "scatter_add")


@dataclass(frozen=True, eq=False)
class Liveness:
    """The held values of one body, an entry each; values of one role and dtype are of one group.

    Attributes:
      first: the operation that makes it, by its place in the order in which they run; 0 for what comes in.
      last: the last operation that needs it; as many as there are for what goes out.
      group: its group.
      values: a value of each group.
      num_bytes: the global bytes of a value of each group.
    """

    first: np.ndarray
    last: np.ndarray
    group: np.ndarray
    values: tuple[int, ...]
    num_bytes: np.ndarray


def liveness(traced: "Traced", *, in_matmuls: bool) -> dict[Body, Liveness]:
    """The lifetimes in every body of a traced function.

    State and batch are there all the time, and what replaces the state takes its place: none of them is counted.

    Args:
      traced: the train step.
      in_matmuls: whether the compiler makes what only matmuls read inside of them, and what is made of no data where
        it is read. A TPU's does; a GPU's matmuls are a library's, and read what lies in memory.

    Source: the buffers of steps compiled for TPUs, tests/data/truth/aot_probe.csv, and for both, docs/check.md.
    """
    body = traced.graph.body
    counted = {*body.inputs, *body.outputs[: len(body.outputs) - traced.num_results]}
    return {body: _of_body(traced, body, counted, in_matmuls) for body in traced.kept}


def _of_body(traced: "Traced", body: Body, counted: set[int], in_matmuls: bool) -> Liveness:
    ops = traced.order[body]
    kept, last = _last_reads(traced, body, ops, in_matmuls)
    groups: dict[tuple[int, int], int] = {}
    values, sizes, rows = list[int](), list[float](), list[tuple[int, int, int]]()
    made = [(0, value) for value in body.inputs]
    made += [(at, value) for at, op in enumerate(ops) for value in op.outputs if value in kept and value in last]
    for at, value in made:
        if value in counted or (in_matmuls and not traced.axes.origins[value]):
            continue
        aval = traced.graph.avals[value]
        itemsize = getattr(aval.dtype, "itemsize", 4)
        group = groups.setdefault((id(traced.sharding_keys[value]), itemsize), len(groups))
        if group == len(values):
            values.append(value)
            sizes.append(float(math.prod(aval.shape)) * itemsize)
        rows.append((at, max(at, last.get(value, len(ops))), group))
    table = np.asarray(rows, int).reshape(-1, 3).T
    return Liveness(table[0], table[1], table[2], tuple(values), np.asarray(sizes))


def _last_reads(traced: "Traced", body: Body, ops: Sequence[Op], in_matmuls: bool) -> tuple[set[int], dict[int, int]]:
    """The values of a body that are held, and the last operation that needs each.

    Numbers put one into each row of zeros, as in the gradient of a cross-entropy, are put there by whoever reads them.
    """
    graph, plan = traced.graph, traced.kept[body]
    readers: dict[int, set[str]] = defaultdict(set)
    for op in ops:
        for value in () if op.name in ALIASES else op.inputs:
            readers[plan.of(value)].add(op.name)
    for value in body.outputs:
        readers[plan.of(value)].add("")
    last, made_where_read = dict(plan.last_reads(ops)), set[int]()
    for op in ops:
        for value in op.outputs:
            if in_matmuls and value in plan.written and readers[value] == {"dot_general"}:
                made_where_read.add(value)
                last |= {of: max(last.get(of, 0), last.get(value, 0)) for of in plan.sources(value)}
        if op.name in SCATTERS and op.params["dimension_numbers"].operand_batching_dims:
            if graph.shape(plan.of(op.inputs[0])) == ():
                made_where_read.update(op.outputs)
    return plan.kept - made_where_read, last
