"""Joins dims that must be sharded together: a union-find over every dim of a graph."""

import math
from collections import Counter
from collections.abc import Collection, Sequence

from spanax.trace.jaxpr.graph import Graph


class Dims:
    """Classes of dims, grown by the rules of the primitives, one call of `join` at a time.

    A class may hold dims of different sizes: a reshape that merges `(heads, head_dim)` joins the merged dim with
    its major factor. Such a class can be split only as often as every one of its sizes allows (`ways`).

    Along the dims `looped` a loop takes turns.
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
        self.kept_whole: set[tuple[int, int]] = set()
        self.unknown: Counter[str] = Counter()
        self.opaque: Counter[str] = Counter()

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self._shapes[value]

    def find(self, value: int, dim: int) -> int:
        """The class of one dim, as a number that stays the same until the next join."""
        return self._root(self._start[value] + dim)

    def classes(self, value: int) -> tuple[int | None, ...]:
        """The class of each dim of a value; None for a dim of size 1, which belongs to none."""
        start = self._start[value]
        shape = self.shape(value)
        return tuple(self._root(start + dim) if size > 1 else None for dim, size in enumerate(shape))

    def ways(self, label: int) -> int:
        """Into how many parts a class can be split at most: every legal number divides this one."""
        return self._ways[self._root(label)]

    def join(self, a: int, dim_a: int, b: int, dim_b: int, *, factor: int | None = None) -> None:
        """Say that two dims are split together.

        Sizes must be equal, unless `factor` names the major factor that both have in common. A dim of size 1
        joins nothing: it broadcasts, and would chain unrelated classes.
        """
        size_a, size_b = self._shapes[a][dim_a], self._shapes[b][dim_b]
        if size_a <= 1 or size_b <= 1 or factor == 1 or (factor is None and size_a != size_b):
            return
        self._unite(self._start[a] + dim_a, self._start[b] + dim_b, factor or 0)

    def same(self, *values: int) -> None:
        """Join the values of an elementwise operation, dim by dim; scalars and broadcast dims stay out."""
        rank = max(len(self._shapes[value]) for value in values)
        full = [value for value in values if len(self._shapes[value]) == rank]
        for dim in range(rank):
            wide = [value for value in full if self._shapes[value][dim] > 1]
            for value in wide[1:]:
                if self._shapes[value][dim] == self._shapes[wide[0]][dim]:
                    self._unite(self._start[wide[0]] + dim, self._start[value] + dim, 0)

    def pieces(self, whole: tuple[int, int], parts: Sequence[tuple[int, int]]) -> None:
        """Say that a dim is made of others end to end (concatenate, split, slice, pad).

        Shards of the whole are not shards of the parts, so nothing is joined yet; parts that turn out to be one
        class, and divide the whole, give the whole their class (`join_pieces`).
        """
        self._pieces.append((whole, list(parts)))

    def merged(self, one: tuple[int, Sequence[int]], other: tuple[int, Sequence[int]]) -> None:
        """Say that the numbers along some dims of a value, from the left, are those along some of another.

        Shards are contiguous, so only the first of them carries a split, and both of these are joined. Only where a
        loop goes along one, nothing inside would be split: then `join_turns` is to say which.
        """
        first, second = (one[0], one[1][0]), (other[0], other[1][0])
        for whole, (value, dims) in ((first, other), (second, one)):
            if len(dims) > 1 and (value, dims[0]) in self._looped:
                self._turns.append((whole, (value, dims[0]), (value, dims[1])))
                return
        self._join_first(first, second)

    def drawn(self, whole: tuple[int, int], part: tuple[int, int]) -> None:
        """Say that numbers along a dim are some of those along another, which ones only the run will tell.

        Nothing is joined, but for examples (`join_turns`): some of them are examples still, where nothing else is
        known of them.
        """
        self._turns.append((whole, None, part))

    def join_turns(self, examples: Sequence[int]) -> None:
        """Join what a loop goes along in parts: examples with those of one turn, anything else with the turns.

        Examples have to move for it, which is little beside a loop in which every device does all of them.
        """
        left, changed = self._turns, True
        while changed:
            labels = {self.find(value, 0) for value in examples}
            known = {label for value in self.graph.body.inputs for label in self.classes(value)} - labels
            found = [
                (whole, major, minor)
                for whole, major, minor in left
                if (major and self.find(*minor) in labels)
                or (self.find(*whole) in labels and (major or self.find(*minor) not in known))
            ]
            for whole, _, minor in found:
                self.join(*whole, *minor, factor=math.gcd(self.size(*whole), self.size(*minor)))
            left, changed = [turn for turn in left if turn not in found], bool(found)
        for whole, major, _ in left:
            if major is not None:
                self._join_first(whole, major)

    def _join_first(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        small, large = sorted((self.size(*one), self.size(*other)))
        if large % small == 0:
            self.join(*one, *other, factor=small)

    def size(self, value: int, dim: int) -> int:
        """The size of one dim."""
        return self._shapes[value][dim]

    def keep_whole(self, value: int, dim: int) -> None:
        """Say that the operation that makes `value` works along this dim (sort, cumsum): it is not free to split."""
        self.kept_whole.add((value, dim))

    def join_pieces(self) -> None:
        """Join wholes with their parts until nothing changes; call it once, after all rules."""
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
