"""The order in which a body's operations run, and the live ranges of its values, for any layout.

A value is live from the kernel that writes it to the last kernel that reads it. A value inside a fused kernel takes no
memory.

An operation runs just before its first consumer. Sums over the batch (gradients) run in trace order; otherwise each
would wait for the optimizer's update and keep its activations alive until then.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spanax.trace.analysis.fusion import ALIASES, FUSED, Kept
from spanax.trace.analysis.labels import Key, label_key
from spanax.trace.analysis.sharding_keys import ShardingKey
from spanax.trace.axes.axes import Traced
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph, Op
from spanax.trace.jaxpr.loops import LOOPS, const_pairs

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

    State and batch are always live, and the updated state reuses their buffers, also as the carry of a loop, such as
    over layers: none of them is included.

    Args:
      traced: the train step.
      stored: for every body, the values stored in memory between kernels.
      order: for every body, its operations in execution order.
      keys: the sharding key of every value, by index.
      in_matmuls: whether the compiler fuses producers into matmuls that are their only consumers, and recomputes
        constants in their consumers. On TPU it does; on GPU, matmuls are library calls and read from memory.

    Source: buffers of steps compiled for TPUs, tests/data/truth/aot_probe.csv; for both, notes/check-accuracy.md.
    """
    graph = traced.graph
    inputs = traced.graph.body.inputs
    excluded = {*inputs, *graph.body.outputs[: traced.num_state]}
    outside = excluded.union(*(plan.kept for plan in stored.values()))
    for op in graph.ops():
        for outer, inner in const_pairs(graph, op) if op.name in LOOPS else ():
            if outer in outside:  # it is live around the loop; else it is made for the loop
                outside.add(inner)
                excluded.add(inner)
    for op in graph.ops():
        excluded.update(_carried_state(graph, op, excluded) if op.name in LOOPS else ())
    if in_matmuls:
        excluded.update(value for value, origin in enumerate(traced.axes.origins) if not origin)
    ranges = dict[Body, Liveness]()
    for body, plan in stored.items():
        in_memory, last = _last_reads(graph, body, plan, order[body], in_matmuls)
        ranges[body] = _of_body(graph, body, order[body], in_memory - excluded, last, keys)
    return ranges


def _carried_state(graph: Graph, op: Op, state: Collection[int]) -> Iterator[int]:
    """Yields the carry of a loop, before and after each iteration, that begins and ends as the state."""
    wires = graph.wires(op)
    starts = {inner: outer for outer, inner in wires.inputs}
    for (result, _), (first, last) in zip(wires.outputs, wires.carried, strict=False):
        if result in state and starts[first] in state:
            yield from (first, last)


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
    outputs = frozenset(body.outputs)
    candidates = [(0, value) for value in body.inputs]
    candidates += [(index, value) for index, op in enumerate(ops) for value in op.outputs if value in last]
    for index, value in candidates:
        # A loop writes the offloaded results of its body into those of the loop.
        if value not in stored or (value in outputs and graph.is_on_host(value)):
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


ALIASING = FUSED | {Family.DYNAMIC_SLICE, Family.DYNAMIC_UPDATE}
"""Operations whose result is an alias of an operand with the same classes: no dim was reduced."""


def alias_pairs(traced: Traced, batch: Collection[int | None], layers: Collection[int | None]) -> dict[int, list[int]]:
    """Returns, for every value, its aliases that are one operation away, as operand or as result."""

    def key(value: int) -> Key:
        labels = traced.axes.classes[value]
        is_batched = any(label in batch for label in labels)
        return () if is_batched else label_key([label for label in labels if label not in layers])

    neighbors: dict[int, list[int]] = {}
    for source, result in _pairs(traced.graph):
        if (source_key := key(source)) and source_key == key(result):
            neighbors.setdefault(source, []).append(result)
            neighbors.setdefault(result, []).append(source)
    return neighbors


def _pairs(graph: Graph) -> Iterator[tuple[int, int]]:
    for op in graph.ops():
        if op.bodies:
            yield from graph.wires(op).pairs
        elif op.family in ALIASING:
            yield from ((value, result) for value in op.inputs for result in op.outputs)


SUM = "add_any"
"""The primitive with which autodiff sums the gradients of one value."""

PASSING = ALIASES | {"convert_element_type", SUM}
"""Operations whose result is the gradient of the same value as their operand."""


def order(
    graph: Graph, bodies: Iterable[Body], keys: Sequence[ShardingKey], batch: Collection[int | None]
) -> dict[Body, tuple[Op, ...]]:
    """Returns the operations of every body in execution order.

    Source: the schedules of steps compiled for TPUs and GPUs, notes/check-accuracy.md.
    """
    return {body: _ordered(graph, body, _batched(body, keys, batch)) for body in bodies}


def _ordered(graph: Graph, body: Body, is_batched: Mapping[int, bool]) -> tuple[Op, ...]:
    producers = graph.producers
    position = {op: index for index, op in enumerate(body.ops)}
    roots = (*_gradients(graph, body, is_batched), *body.outputs)
    first_ops = {producers[value] for value in roots if value in producers}
    result: dict[Op, None] = {}
    for op in (*sorted(first_ops, key=lambda op: position[op]), *body.ops):
        if op not in result:
            result |= dict.fromkeys(_needed(op, producers, result))
    return tuple(result)


def _needed(op: Op, producers: dict[int, Op], done: dict[Op, None]) -> Iterator[Op]:
    """Yields the pending producers that an operation depends on in topological order, and then the operation."""
    seen = {op}
    stack = [(op, iter(op.inputs))]
    while stack:
        top, operands = stack[-1]
        for value in operands:
            producer = producers.get(value)
            if producer is not None and producer not in seen and producer not in done:
                seen.add(producer)
                stack.append((producer, iter(producer.inputs)))
                break
        else:
            yield top
            stack.pop()


def _gradients(graph: Graph, body: Body, is_batched: Mapping[int, bool]) -> Iterator[int]:
    """Yields sums over the batch; of sums that are added to each other, only the last."""
    summed: dict[int, Op] = {}
    for op in body.ops:
        if any(is_batched[value] for value in op.inputs) or (
            op.name in PASSING and any(value in summed for value in op.inputs)
        ):
            summed |= {value: op for value in op.outputs if not is_batched[value]}
    added = set[int]()
    for value, producer in reversed(summed.items()):
        after = [op for op in graph.readers[value] if op.name in PASSING]
        if any(op.name == SUM or added.intersection(op.outputs) for op in after):
            added.add(value)
        elif producer.name == SUM or producer.name not in PASSING:
            yield value


def _batched(body: Body, keys: Sequence[ShardingKey], batch: Collection[int | None]) -> dict[int, bool]:
    """Returns, for every value of a body, whether it has a batch dim."""
    labels = frozenset(batch)
    values = (*body.inputs, *(value for op in body.ops for value in (*op.inputs, *op.outputs)))
    return {value: not labels.isdisjoint(keys[value].labels) for value in values}
