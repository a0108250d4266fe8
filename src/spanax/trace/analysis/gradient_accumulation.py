"""Partial gradients consumed only by their sum; one all-reduce suffices.

Where both operands of such a sum are partial sums over devices, a compiler may add first and reduce once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanax.trace.analysis.fusion import ALIASES
from spanax.trace.analysis.op_groups import OpGroup
from spanax.trace.jaxpr.graph import Body, Op

if TYPE_CHECKING:
    from spanax.trace.traced import Traced

ADDITIONS = frozenset({"add", "add_any"})
PASSING = (ALIASES - {"broadcast_in_dim", "expand_dims"}) | {"convert_element_type"}
"""Operations behind which a sum is still the same sum."""


@dataclass(frozen=True, eq=False)
class GradientSum:
    """Results that meet in one sum, and nowhere else.

    Attributes:
      sums: which is added to which, each addition after what it adds: kinds of operations, and None for an addition of
        the two before it.
      met: the values that are added, in this order, and how often they meet; for every place where they do.
    """

    sums: tuple["OpGroup | None", ...]
    met: tuple[tuple[tuple[int, ...], int], ...]


def gradient_sums(traced: "Traced") -> list[GradientSum]:
    """Every sum of results that nothing else reads, all of one kind together."""
    kinds = {op: (kind, runs) for kind in traced.op_groups for op, runs in kind.ops}
    found: dict[tuple[OpGroup | None, ...], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for body in traced.kept:
        for sums in _sums(body):
            leaves = [op for op in sums if op is not None]
            key = tuple(None if op is None else kinds[op][0] for op in sums)
            found[key].append((tuple(op.outputs[0] for op in leaves), kinds[leaves[0]][1]))
    return [GradientSum(sums, tuple(met)) for sums, met in found.items()]


def _sums(body: Body) -> Iterator[list[Op | None]]:
    """The sums of a body that are part of no larger one."""
    makers = {op.outputs[0]: op for op in body.ops if len(op.outputs) == 1 and not op.bodies}
    reads = Counter(value for op in body.ops for value in op.inputs) + Counter(body.outputs)
    added: dict[Op, tuple[Op, Op]] = {}
    inside = set[Op]()
    for op in body.ops:
        if op.name in ADDITIONS:
            left, right = (_source(value, makers, reads) for value in op.inputs)
            if left and right and all(one.name not in ADDITIONS or one in added for one in (left, right)):
                added[op] = left, right
                inside.update((left, right))
    yield from (_flat(op, added) for op in added if op not in inside)


def _source(value: int, makers: Mapping[int, Op], reads: Mapping[int, int]) -> Op | None:
    """What made a value that is read once, views and dtypes aside."""
    while (op := makers.get(value)) is not None and reads[value] == 1:
        if op.name not in PASSING:
            return op
        value = op.inputs[0]
    return None


def _flat(root: Op, added: Mapping[Op, tuple[Op, Op]]) -> list[Op | None]:
    """Each addition after what it adds. A sum over all parameters is as deep as they are many: no recursion."""
    found, left = list[Op | None](), [root]
    while left:
        op = left.pop()
        found.append(None if op in added else op)
        left += added.get(op, ())
    return found[::-1]
