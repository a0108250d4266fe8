"""Partial gradients consumed only by their sum; one all-reduce suffices.

Where both operands of such a sum are partial sums over devices, a compiler may add first and reduce once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from spanax.trace.analysis.fusion import ALIASES
from spanax.trace.analysis.op_groups import OpGroup
from spanax.trace.jaxpr.graph import Body, Graph, Op

ADDITIONS = frozenset({"add", "add_any"})
PASSING = (ALIASES - {"broadcast_in_dim", "expand_dims"}) | {"convert_element_type"}
"""Operations that do not change the elements of a sum, except by rounding."""


@dataclass(frozen=True, eq=False)
class GradientSum:
    """A sum of results that have no other consumer.

    Attributes:
      sums: the sum in postfix order: the group of each operand, and None for an addition of two preceding operands.
      occurrences: for each occurrence of the sum, its operands in this order, and the number of runs.
    """

    sums: tuple[OpGroup | None, ...]
    occurrences: tuple[tuple[tuple[int, ...], int], ...]


def gradient_sums(graph: Graph, bodies: Iterable[Body], op_groups: Iterable[OpGroup]) -> list[GradientSum]:
    """Returns the sums of results that have no other consumer, grouped by the op groups of their operands."""
    groups = {op: (group, runs) for group in op_groups for op, runs in group.ops}
    occurrences: dict[tuple[OpGroup | None, ...], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for body in bodies:
        for sums in _sums(graph, body):
            leaves = [op for op in sums if op is not None]
            key = tuple(None if op is None else groups[op][0] for op in sums)
            occurrences[key].append((tuple(op.outputs[0] for op in leaves), groups[leaves[0]][1]))
    return [GradientSum(sums, tuple(values)) for sums, values in occurrences.items()]


def _sums(graph: Graph, body: Body) -> Iterator[list[Op | None]]:
    """Yields the sums of a body that are not part of a larger sum."""
    outputs = Counter(body.outputs)
    added: dict[Op, tuple[Op, Op]] = {}
    nested = set[Op]()
    for op in body.ops:
        if op.name in ADDITIONS:
            left, right = (_source(graph, value, outputs) for value in op.inputs)
            if left and right and all(operand.name not in ADDITIONS or operand in added for operand in (left, right)):
                added[op] = left, right
                nested.update((left, right))
    yield from (_flat(op, added) for op in added if op not in nested)


def _source(graph: Graph, value: int, outputs: Mapping[int, int]) -> Op | None:
    """Returns the producer of a value that is read once, through views and casts."""
    while (op := graph.producers.get(value)) is not None and len(graph.readers[value]) + outputs[value] == 1:
        if op.name not in PASSING:
            return op if len(op.outputs) == 1 and not op.bodies else None
        value = op.inputs[0]
    return None


def _flat(root: Op, added: Mapping[Op, tuple[Op, Op]]) -> list[Op | None]:
    """Returns a sum in postfix order, without recursion: a sum over all parameters is as deep as their number."""
    postfix = list[Op | None]()
    stack = [root]
    while stack:
        op = stack.pop()
        postfix.append(None if op in added else op)
        stack += added.get(op, ())
    return postfix[::-1]
