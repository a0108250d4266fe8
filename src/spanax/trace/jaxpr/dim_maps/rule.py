"""Adds a user's primitive to the table, by a function that states which of its dims correspond."""

from collections.abc import Callable, Iterator

from spanax.trace.jaxpr.dim_maps import table  # noqa: F401  (a user's row replaces one of the table)
from spanax.trace.jaxpr.dim_maps.registry import TABLE, Padding, Row, aligned
from spanax.trace.jaxpr.dim_maps.relations import Dim, Equation, Kind, Relation, Shape

Rule = Callable[[Equation, "Recorder"], None]


class Recorder:
    """Records what a rule states about the dims of one equation, whose values are numbered by position."""

    def __init__(self, equation: Equation):
        self._equation = equation
        self._classes: list[set[Dim]] = []
        self._others: list[Relation] = []

    def shape(self, value: int) -> Shape:
        """Returns the shape of a value."""
        return self._equation.shapes[value]

    def size(self, value: int, dim: int) -> int:
        """Returns the size of one dim."""
        return self.shape(value)[dim]

    def same(self, *values: int) -> None:
        """Relates the values of an elementwise operation, dim by dim; scalars and dims of size 1 broadcast."""
        for relation in aligned(self._equation.shapes, values):
            for dim in relation.dims[1:]:
                self.join(*relation.dims[0], *dim)

    def join(self, a: int, dim_a: int, b: int, dim_b: int, *, factor: int | None = None) -> None:
        """Relates two dims of equal size whose rows correspond; with `factor`, only that many major groups of rows."""
        dims = {(a, dim_a), (b, dim_b)}
        if factor is not None:
            self._others.append(Relation(Kind.GROUPS, ((a, dim_a), (b, dim_b)), factor=factor))
        elif len({self.size(*dim) for dim in dims}) == 1:
            touched = [each for each in self._classes if each & dims]
            self._classes = [each for each in self._classes if not each & dims] + [dims.union(*touched)]

    def keep_whole(self, value: int, dim: int) -> None:
        """Records that the operation works along a dim of its result (sort, cumsum): rows depend on other rows."""
        self._others.append(Relation(Kind.ALONG, ((value, dim),)))

    def relations(self) -> Iterator[Relation]:
        """Yields all recorded relations."""
        classes = (tuple(sorted(dims)) for dims in self._classes)
        yield from (Relation(Kind.SAME, dims) for dims in sorted(classes, key=lambda dims: dims[0][::-1]))
        yield from self._others


def rule(*names: str, padding: Padding | None = None) -> Callable[[Rule], Rule]:
    """Registers a rule for primitives, which replaces their rows in the table.

    A primitive whose values are all related by `dims.same` is elementwise: it is fused, recomputed and chunked as such.

    Args:
      names: the primitives, as a jaxpr prints them.
      padding: how they compute with padded dims; None: padding is removed before.

    Example:
      >>> @rule("my_scale")                              # a custom primitive: y = scale(x), elementwise
      ... def my_scale(op, dims):
      ...     dims.same(*op.inputs, *op.outputs)
      >>> "my_scale" in TABLE
      True
    """

    def register(function: Rule) -> Rule:
        def relations(equation: Equation) -> Iterator[Relation]:
            recorder = Recorder(equation)
            function(equation, recorder)
            return recorder.relations()

        TABLE.update(dict.fromkeys(names, Row(None, relations, padding)))
        return function

    return register
