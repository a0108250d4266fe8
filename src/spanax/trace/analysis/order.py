"""The order in which a memory-minimizing compiler runs the operations of a body.

An operation runs just before its first consumer. Sums over the batch (gradients) run in trace order; otherwise each
would wait for the optimizer's update and keep its activations alive until then.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from spanax.trace.analysis.fusion import ALIASES
from spanax.trace.analysis.sharding_keys import ShardingKey
from spanax.trace.jaxpr.graph import Body, Graph, Op

SUM = "add_any"
"""The primitive with which autodiff sums the gradients of one value."""

PASSING = ALIASES | {"convert_element_type", SUM}
"""Operations whose result is the gradient of the same value as their operand."""


def order(
    graph: Graph, bodies: Iterable[Body], keys: Sequence[ShardingKey], batch: Collection[int | None]
) -> dict[Body, tuple[Op, ...]]:
    """Returns the operations of every body in execution order.

    Args:
      graph: the operations of a traced function.
      bodies: its bodies.
      keys: the sharding key of every value, by index.
      batch: the classes of batch dims.

    Source: the schedules of steps compiled for TPUs and GPUs, docs/check.md.
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
