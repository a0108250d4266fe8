"""Meeting: results that are added to each other and read by nothing else, as gradients of one value that several used.

If both are sums over devices, a compiler may add first and sum over the devices once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from spanax.trace.census import Kind
from spanax.trace.fusion import ALIASES
from spanax.trace.graph import Body, Op

if TYPE_CHECKING:
    from spanax.trace.traced import Traced

ADDITIONS = frozenset({"add", "add_any"})
PASSING = (ALIASES - {"broadcast_in_dim", "expand_dims"}) | {"convert_element_type"}
"""Operations behind which a sum is still the same sum."""

Tree = Union["Kind", tuple["Tree", "Tree"]]
"""What is added to what: results of a kind of operation, or two such sums."""


@dataclass(frozen=True, eq=False)
class Meeting:
    """Results that meet: which is added to which; the values in that order, and how often they meet."""

    tree: Tree
    met: tuple[tuple[tuple[int, ...], int], ...]


def meetings(traced: "Traced") -> list[Meeting]:
    """Every sum of results that nothing else reads, all of one kind together."""
    kinds = {op: (kind, runs) for kind in traced.census for op, runs in kind.ops}
    found: dict[Tree, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for body in traced.kept:
        for tree, leaves in _trees(body):
            values = tuple(op.outputs[0] for op in leaves)
            found[_of_kinds(tree, kinds)].append((values, kinds[leaves[0]][1]))
    return [Meeting(tree, tuple(met)) for tree, met in found.items()]


def _trees(body: Body) -> Iterator[tuple[Any, list[Op]]]:
    """The sums of a body that are part of no larger one, each with its operations."""
    makers = {op.outputs[0]: op for op in body.ops if len(op.outputs) == 1 and not op.bodies}
    reads = Counter(value for op in body.ops for value in op.inputs) + Counter(body.outputs)

    def source(value: int) -> Op | None:
        """What made a value that is read once, views and dtypes aside."""
        while (op := makers.get(value)) is not None and reads[value] == 1:
            if op.name not in PASSING:
                return op
            value = op.inputs[0]
        return None

    def tree(op: Op) -> tuple[Any, list[Op], list[Op]] | None:
        """What is added to what in the end, what makes it, and the additions."""
        if op.name not in ADDITIONS:
            return op, [op], []
        parts = [source(value) for value in op.inputs]
        left, right = (None if part is None else tree(part) for part in parts)
        if left is None or right is None:
            return None
        return (left[0], right[0]), left[1] + right[1], [op, *left[2], *right[2]]

    inside = set[Op]()
    for op in reversed(body.ops):
        if op.name in ADDITIONS and op not in inside and (made := tree(op)) is not None:
            inside.update(made[2])
            yield made[0], made[1]


def _of_kinds(tree: Any, kinds: Mapping[Op, tuple["Kind", int]]) -> Tree:
    if isinstance(tree, Op):
        return kinds[tree][0]
    return _of_kinds(tree[0], kinds), _of_kinds(tree[1], kinds)
