"""Joins dims that must be sharded together: a union-find over every dim of a graph."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction

from spanax.trace.axes.pieces import Part, Pieces, cuts, largest, relative_sizes
from spanax.trace.jaxpr.dim_maps.relations import Dim, Kind, Relation
from spanax.trace.jaxpr.graph import CONTRACTIONS, LAYER_PARTS, PADDING, Graph, Op

JOINED = frozenset({Kind.SAME, Kind.REORDERED, Kind.CONTRACTED, Kind.GROUPS})
"""Relations of dims that are sharded together."""


def is_padding(op: Op) -> bool:
    """Returns whether an operation pads an uneven axis, or cuts the padding."""
    return PADDING in str(op.eqn.source_info.name_stack)


def _is_partition_of_layers(op: Op) -> bool:
    return LAYER_PARTS in str(op.eqn.source_info.name_stack)


def joined(graph: Graph, looped: Collection[Dim], apart: Collection[Dim] = ()) -> "Dims":
    """Returns the classes of a graph's dims, joined by its operations.

    Loops iterate along the dims `looped`; the factors `apart` of dims of weights are taken apart element by element.
    """
    dims = Dims(graph, looped, apart)
    for op in graph.ops():
        dims.add(op)
    return dims


class Dims:
    """Classes of dims that are sharded together, joined by the dim maps of the operations.

    A class may contain dims of different sizes: a reshape that merges `(heads, head_dim)` joins the merged dim with
    its major factor. The number of shards of such a class is limited by all of its sizes (`ways`).

    Loops iterate along the dims `looped`; the factors `apart` of dims of weights are taken apart element by element.
    """

    def __init__(self, graph: Graph, looped: Collection[Dim] = (), apart: Collection[Dim] = ()):
        self.graph = graph
        self._start: list[int] = []
        self._shapes = [graph.shape(value) for value in range(len(graph.avals))]
        sizes: list[int] = []
        for shape in self._shapes:
            self._start.append(len(sizes))
            sizes.extend(shape)
        self._parent = list(range(len(sizes)))
        self._ways = sizes
        self._pieces: list[tuple[Dim, Sequence[Dim]]] = []
        self._parts: list[Part] = []
        self._apart = apart
        self._wholes: dict[Dim, tuple[tuple[int, ...], Dim, tuple[Dim, ...], tuple[Dim, ...]]] = {}
        self._padded: list[tuple[Dim, Dim]] = []
        self._turns: list[tuple[Dim, Dim | None, Dim]] = []
        self._factors: list[tuple[Dim, Dim, Dim]] = []
        self._looped = looped
        self.replicated: set[Dim] = set()
        self.unknown: Counter[str] = Counter()
        self.opaque: Counter[str] = Counter()

    def add(self, op: Op) -> None:
        """Joins the dims that must be sharded together because of one operation.

        A dim that nothing joins stays replicated, which is always correct. A primitive without a row in the table joins
        nothing and is counted; discovery reports it.
        """
        if op.bodies:
            self._add_bodies(op)
            return
        values = (*op.inputs, *op.outputs)
        for relation in op.dim_map.relations:
            dims = [(values[array], dim) for array, dim in relation.dims]
            if relation.kind in JOINED:
                for dim in dims[1:]:
                    self.join(*dims[0], *dim, factor=relation.factor)
            elif relation.kind is Kind.PARTS and (is_padding(op) or _is_partition_of_layers(op)):
                self._padded += [(dims[0], part) for part in dims[1:]]
            else:
                self._record(op.name, relation, dims, values)

    def _record(self, name: str, relation: Relation, dims: Sequence[Dim], values: Sequence[int]) -> None:
        match relation.kind:
            case Kind.FACTORS:
                self.merged(dims, [(values[array], dim) for array, dim in relation.other])
            case Kind.PARTS:
                self._pieces.append((dims[0], dims[1:]))
                size = self.size(*dims[0])
                self._parts += [
                    Part(dims[0], part, Fraction(start, size), Fraction(self.size(*part), size))
                    for part, start in zip(dims[1:], relation.starts, strict=True)
                ]
            case Kind.SELECTED:
                self._turns.append((dims[0], None, dims[1]))
            case Kind.ALONG:
                self.replicated.update(dims)
            case Kind.OPAQUE:
                self.opaque[name] += 1
            case Kind.UNKNOWN:
                self.unknown[name] += 1

    def _add_bodies(self, op: Op) -> None:
        """Joins dims across a body's boundary and its carry; a scanned value has an extra leading dim outside."""
        wires = self.graph.wires(op)
        scanned = []
        for outer, inner in (*wires.inputs, *wires.outputs):
            extra = len(self.shape(outer)) - len(self.shape(inner))
            scanned += [outer] * extra
            for dim in range(len(self.shape(inner))):
                self.join(outer, dim + extra, inner, dim)
        for outer in scanned[1:]:
            self.join(scanned[0], 0, outer, 0)
        for first, last in wires.carried:
            self.same(first, last)

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

    def labels(self, values: Iterable[int]) -> set[int]:
        """Returns the classes of the dims of some values."""
        return {label for value in values for label in self.classes(value) if label is not None}

    def ways(self, label: int) -> int:
        """Returns the largest number of shards of a class; every valid number divides it."""
        return self._ways[self._root(label)]

    def join(self, a: int, dim_a: int, b: int, dim_b: int, *, factor: int | None = None) -> None:
        """Joins two dims, which are then sharded together.

        Sizes must be equal, unless `factor` is the major factor that both have in common. A dim of size 1
        joins nothing: it broadcasts, and would chain unrelated classes.
        """
        size_a = self._shapes[a][dim_a]
        size_b = self._shapes[b][dim_b]
        if size_a <= 1 or size_b <= 1 or factor == 1 or (factor is None and size_a != size_b):
            return
        self._unite(self._start[a] + dim_a, self._start[b] + dim_b, factor or 0)

    def same(self, first: int, second: int) -> None:
        """Joins two values of equal shape, dim by dim."""
        if len(self.shape(first)) == len(self.shape(second)):
            for dim in range(len(self.shape(first))):
                self.join(first, dim, second, dim)

    def merged(self, left: Sequence[Dim], right: Sequence[Dim]) -> None:
        """Joins the major dims of two runs of dims with the same elements in row-major order (reshape).

        Shards are contiguous, so only the major dim of each run can be sharded. If a loop iterates along it, the
        loop's body would remain replicated, and `join_turns` selects the dim instead.
        """
        for first, run in ((left[0], right), (right[0], left)):
            if len(run) > 1 and run[0] in self._apart:
                size = self.size(*run[0])
                self._parts += [Part(first, run[1], Fraction(index, size), Fraction(1, size)) for index in range(size)]
                return
            if len(run) > 1:
                self._factors.append((first, run[0], run[1]))
            if len(run) > 1 and run[0] in self._looped:
                self._turns.append((first, run[0], run[1]))
                return
        self._join_first(left[0], right[0])

    def links(self) -> dict[int, set[int]]:
        """Returns, for each class, those of selections along it, of its parts, and of what it is a part of."""
        links = defaultdict[int, set[int]](set)
        for whole, _, minor in self._turns:
            links[self.find(*whole)].add(self.find(*minor))
        for whole, _, minor in self._factors:
            links[self.find(*minor)].add(self.find(*whole))
        for whole, parts in self._pieces:
            for part in parts:
                links[self.find(*whole)].add(self.find(*part))
                links[self.find(*part)].add(self.find(*whole))
        return links

    def with_factors(self, consumed: Collection[int]) -> set[int]:
        """Returns classes of which a loop takes one element at a time, with those of the same factor of a merged dim.

        The parts of a merged dim are elements of a factor too: the two views of every example, one after the other.
        """
        parts = {(self.find(*whole), self.size(*part)) for whole, parts in self._pieces for part in parts}
        keys = {
            (whole, major, minor): (self.find(*whole), self.size(*major), self.size(*minor))
            for whole, major, minor in self._factors
        }
        taken = {key for (_, major, _), key in keys.items() if self.find(*major) in consumed}
        taken |= {key for key in keys.values() if key[::2] in parts}
        return {*consumed} | {self.find(*major) for (_, major, _), key in keys.items() if key in taken}

    def majors(self, labels: Collection[int]) -> set[Dim]:
        """Returns the major dims of merged dims with some classes."""
        return {major for _, major, _ in self._factors if self.find(*major) in labels}

    def groups(self, heads: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Returns, for classes of heads, those of the next factor of their merged dims: the queries of one key.

        No input has them, and no contraction sums over them alone, as it does over the channels of a head.
        """
        graph = self.graph
        contracted = [
            (op.inputs[0], op.dim_map.contraction[0]) for op in graph.ops() if heads and op.name in CONTRACTIONS
        ]
        other = self.labels(graph.body.inputs) | {self.find(*dim) for dim in self.replicated}
        other |= {self.find(value, pairs[0][0]) for value, pairs in contracted if len(pairs) == 1}
        other |= {self.find(*dim) for whole, parts in self._pieces for dim in (whole, *parts)}
        found = defaultdict[int, set[int]](set)
        for whole, major, minor in self._factors:
            label = self.find(*whole)
            if label in heads and label == self.find(*major) and self.size(*minor) > 1:
                found[label].add(self.find(*minor))
        return {label: groups for label, minors in found.items() if (groups := tuple(sorted(minors - other)))}

    def join_turns(self, examples: Sequence[Dim]) -> None:
        """Joins dims that a loop divides into iterations: examples with the minor dim, other dims with the loop's dim.

        This reshards the examples, which costs little compared to a loop over all examples on every device.
        """
        pending = self._turns
        changed = True
        while changed:
            labels = {self.find(*dim) for dim in examples}
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

    def _join_first(self, first: Dim, second: Dim) -> None:
        small, large = sorted((self.size(*first), self.size(*second)))
        if large % small == 0:
            self.join(*first, *second, factor=small)

    def size(self, value: int, dim: int) -> int:
        """Returns the size of one dim."""
        return self._shapes[value][dim]

    def has_parts(self, labels: Collection[int]) -> bool:
        """Returns whether dims with some classes have parts, or factors that are taken apart."""
        return any(part.size < 1 and self.find(*part.whole) in labels for part in self._parts) or bool(
            self.apart(labels)
        )

    def apart(self, labels: Collection[int]) -> set[Dim]:
        """Returns the major factors of merged dims with some classes that are taken apart element by element."""
        taken = {part.whole for part in self._parts if self.size(*part.dim) == 1}
        for op in self.graph.ops():
            if op.name in ("stack", "unstack"):
                arrays = op.outputs if op.name == "stack" else op.inputs
                taken |= {(array, op.params["axis"] % len(self.shape(array))) for array in arrays}
        kinds = {(self.find(*dim), self.size(*dim)) for dim in taken}
        majors = [major for whole, major, _ in self._factors if self.find(*whole) in labels]
        return {major for major in majors if (self.find(*major), self.size(*major)) in kinds}

    def find_pieces(self, labels: Collection[int], stored: Collection[int]) -> None:
        """Finds the classes, of some and of their parts, that are a concatenation of pieces.

        Every device can then have its shard of each piece. Call it before `join_pieces`.

        Args:
          labels: the classes.
          stored: the classes of all dims of weights.
        """
        if not labels:
            return
        parts = [(self.find(*part.whole), self.find(*part.dim), part) for part in self._parts]
        parts = [entry for entry in parts if entry[0] != entry[1] and entry[2].size < 1]
        known = {*labels}
        while more := {of_part for label, of_part, _ in parts if label in known} - known:
            known |= more
        sizes = defaultdict[int, int](int)
        for value, shape in enumerate(self._shapes):
            for label, size in zip(self.classes(value), shape, strict=True):
                if label is not None:
                    sizes[label] = math.gcd(sizes[label], size)
        contracted = {
            self.find(op.inputs[0], pair[0])
            for op in self.graph.ops()
            if op.name in CONTRACTIONS
            for pair in op.dim_map.contraction[0]
        }
        for label, found in cuts(parts).items():
            pieces = relative_sizes(found)
            ways, rest = divmod(sizes[label], sum(pieces))
            own = {(of_part, part.start, part.size): part for whole, of_part, part in parts if whole == label}
            if label in known and own and ways > 1 and not rest:
                main = largest(own)
                part = next(part for (of_part, *_), part in own.items() if of_part == main)
                others = {of_part: part.dim for (of_part, *_), part in own.items() if of_part != main}
                follow = tuple(dim for other, dim in others.items() if other not in {*stored, *contracted})
                weighted = tuple(dim for other, dim in others.items() if other in stored)
                self._wholes[part.whole] = pieces, part.dim, follow, weighted
                self._ways[label] = math.gcd(ways, self._ways[label])

    def wholes(self) -> dict[int, Pieces]:
        """Returns the classes that are a concatenation of pieces."""
        main_parts = {self.find(*whole): self.find(*main) for whole, (_, main, *_) in self._wholes.items()}

        def innermost(label: int) -> int:
            return innermost(main_parts[label]) if label in main_parts else label

        result = dict[int, Pieces]()
        for whole, (sizes, main, others, weighted) in self._wholes.items():
            label = self.find(*whole)
            is_mixed = any(innermost(self.find(*other)) != innermost(label) for other in weighted)
            result[label] = Pieces(
                sizes, self.find(*main), tuple(self.find(*other) for other in others), is_mixed=is_mixed
            )
        return result

    def join_pieces(self) -> None:
        """Joins concatenated dims with their parts until nothing changes; call it once, after all operations.

        Shards of a concatenation are not shards of its parts, unless these have one class and sizes that divide it.
        """
        changed = True
        while changed:
            changed = False
            wholes = self.wholes()
            for (whole, dim), parts in self._pieces:
                size = self.shape(whole)[dim]
                part_sizes = [self.shape(part)[part_dim] for part, part_dim in parts]
                if self.find(whole, dim) in wholes:
                    continue
                if min(part_sizes) <= 1 or any(size % part_size for part_size in part_sizes):
                    continue
                labels = {self.find(part, part_dim) for part, part_dim in parts}
                if len(labels) == 1 and labels != {self.find(whole, dim)}:
                    self.join(whole, dim, *parts[0], factor=math.gcd(size, *part_sizes))
                    changed = True

    def join_padded(self) -> None:
        """Joins padded dims with the dims they pad, and layers with their parts; call it last, after all other joins.

        The number of shards of the class is that of the padded dims; of its other dims, those that divide are sharded.
        """
        ways = {self.find(*padded): self.ways(self.find(*padded)) for padded, _ in self._padded}
        for padded, true in self._padded:
            self._unite(self._start[padded[0]] + padded[1], self._start[true[0]] + true[1], 0)
        limits: dict[int, int] = {}
        for label, count in ways.items():
            limits[self._root(label)] = math.gcd(count, limits.get(self._root(label), 0))
        for label, count in limits.items():
            self._ways[label] = count

    def _unite(self, a: int, b: int, factor: int) -> None:
        i = self._root(a)
        j = self._root(b)
        if i != j or factor:
            ways = math.gcd(self._ways[i], self._ways[j], factor)
            self._parent[max(i, j)] = min(i, j)
            self._ways[min(i, j)] = ways

    def _root(self, index: int) -> int:
        parent = self._parent
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index
