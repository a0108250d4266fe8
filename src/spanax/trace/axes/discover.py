"""Joins dims that must be sharded together: a union-find over every dim of a graph."""

import math
from collections import Counter
from collections.abc import Collection, Sequence

from spanax.trace.jaxpr.graph import Graph


class Dims:
    """Classes of dims that are sharded together, joined by the rules of the primitives.

    A class may contain dims of different sizes: a reshape that merges `(heads, head_dim)` joins the merged dim with
    its major factor. The number of shards of such a class is limited by all of its sizes (`ways`).

    Loops iterate along the dims `looped`.
    """

    def __init__(self, graph: Graph, looped: Collection[tuple[int, int]] = ()):
        self.graph = graph
        self._start: list[int] = []
        self._shapes = [graph.shape(value) for value in range(len(graph.avals))]
        sizes: list[int] = []
        for shape in self._shapes:
            self._start.append(len(sizes))
            sizes.extend(shape)
        self._parent = list(range(len(sizes)))
        self._ways = sizes
        self._pieces: list[tuple[tuple[int, int], list[tuple[int, int]]]] = []
        self._turns: list[tuple[tuple[int, int], tuple[int, int] | None, tuple[int, int]]] = []
        self._looped = looped
        self.replicated: set[tuple[int, int]] = set()
        self.unknown: Counter[str] = Counter()
        self.opaque: Counter[str] = Counter()

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value."""
        return self._shapes[value]

    def find(self, value: int, dim: int) -> int:
        """Returns the class of one dim, as a number that is stable until the next join."""
        return self._root(self._start[value] + dim)

    def classes(self, value: int) -> tuple[int | None, ...]:
        """Returns the class of each dim of a value; None for a dim of size 1, which has no class."""
        start = self._start[value]
        shape = self.shape(value)
        return tuple(self._root(start + dim) if size > 1 else None for dim, size in enumerate(shape))

    def ways(self, label: int) -> int:
        """Returns the largest number of shards of a class; every valid number divides it."""
        return self._ways[self._root(label)]

    def join(self, a: int, dim_a: int, b: int, dim_b: int, *, factor: int | None = None) -> None:
        """Joins two dims, which are then sharded together.

        Sizes must be equal, unless `factor` is the major factor that both have in common. A dim of size 1
        joins nothing: it broadcasts, and would chain unrelated classes.
        """
        size_a, size_b = self._shapes[a][dim_a], self._shapes[b][dim_b]
        if size_a <= 1 or size_b <= 1 or factor == 1 or (factor is None and size_a != size_b):
            return
        self._unite(self._start[a] + dim_a, self._start[b] + dim_b, factor or 0)

    def same(self, *values: int) -> None:
        """Joins the values of an elementwise operation, dim by dim; scalars and broadcast dims are skipped."""
        rank = max(len(self._shapes[value]) for value in values)
        full = [value for value in values if len(self._shapes[value]) == rank]
        for dim in range(rank):
            wide = [value for value in full if self._shapes[value][dim] > 1]
            for value in wide[1:]:
                if self._shapes[value][dim] == self._shapes[wide[0]][dim]:
                    self._unite(self._start[wide[0]] + dim, self._start[value] + dim, 0)

    def pieces(self, whole: tuple[int, int], parts: Sequence[tuple[int, int]]) -> None:
        """Records that dim `whole` is a concatenation of dims `parts` (concatenate, split, slice, pad).

        Shards of `whole` are not shards of `parts`, so nothing is joined yet; `join_pieces` joins `whole` with parts
        of one class whose sizes divide its size.
        """
        self._pieces.append((whole, list(parts)))

    def merged(self, one: tuple[int, Sequence[int]], other: tuple[int, Sequence[int]]) -> None:
        """Joins the major dims of two groups of dims with the same elements in row-major order (reshape).

        Shards are contiguous, so only the major dim of each group can be sharded. If a loop iterates along it, the
        loop's body would remain replicated, and `join_turns` selects the dim instead.
        """
        first, second = (one[0], one[1][0]), (other[0], other[1][0])
        for whole, (value, dims) in ((first, other), (second, one)):
            if len(dims) > 1 and (value, dims[0]) in self._looped:
                self._turns.append((whole, (value, dims[0]), (value, dims[1])))
                return
        self._join_first(first, second)

    def drawn(self, whole: tuple[int, int], part: tuple[int, int]) -> None:
        """Records that dim `part` is a selection along dim `whole` by indices known only at run time.

        Nothing is joined except for examples (`join_turns`): a selection of examples is again a dim of examples,
        unless its class is known otherwise.
        """
        self._turns.append((whole, None, part))

    def join_turns(self, examples: Sequence[int]) -> None:
        """Joins dims that a loop divides into iterations: examples with the minor dim, other dims with the loop's dim.

        This reshards the examples, which costs little compared to a loop over all examples on every device.
        """
        pending, changed = self._turns, True
        while changed:
            labels = {self.find(value, 0) for value in examples}
            known = {label for value in self.graph.body.inputs for label in self.classes(value)} - labels
            matches = [
                (whole, major, minor)
                for whole, major, minor in pending
                if (major and self.find(*minor) in labels)
                or (self.find(*whole) in labels and (major or self.find(*minor) not in known))
            ]
            for whole, _, minor in matches:
                self.join(*whole, *minor, factor=math.gcd(self.size(*whole), self.size(*minor)))
            pending, changed = [record for record in pending if record not in matches], bool(matches)
        for whole, major, _ in pending:
            if major is not None:
                self._join_first(whole, major)

    def _join_first(self, first: tuple[int, int], second: tuple[int, int]) -> None:
        small, large = sorted((self.size(*first), self.size(*second)))
        if large % small == 0:
            self.join(*first, *second, factor=small)

    def size(self, value: int, dim: int) -> int:
        """Returns the size of one dim."""
        return self._shapes[value][dim]

    def keep_whole(self, value: int, dim: int) -> None:
        """Records that the producer of `value` operates along this dim (sort, cumsum): sharding it is not free."""
        self.replicated.add((value, dim))

    def join_pieces(self) -> None:
        """Joins concatenated dims with their parts until nothing changes; call it once, after all rules."""
        changed = True
        while changed:
            changed = False
            for (whole, dim), parts in self._pieces:
                size = self.shape(whole)[dim]
                part_sizes = [self.shape(part)[part_dim] for part, part_dim in parts]
                if min(part_sizes) <= 1 or any(size % part_size for part_size in part_sizes):
                    continue
                labels = {self.find(part, part_dim) for part, part_dim in parts}
                if len(labels) == 1 and labels != {self.find(whole, dim)}:
                    self.join(whole, dim, *parts[0], factor=math.gcd(size, *part_sizes))
                    changed = True

    def _unite(self, a: int, b: int, factor: int) -> None:
        i, j = self._root(a), self._root(b)
        if i != j or factor:
            ways = math.gcd(self._ways[i], self._ways[j], factor)
            self._parent[max(i, j)] = min(i, j)
            self._ways[min(i, j)] = ways

    def _root(self, index: int) -> int:
        parent = self._parent
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index
