"""The examples of a batch, counted along the dims that have them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

ExampleDims = tuple[int | None, ...]
"""For each array of a batch the dim with its examples; None for an array without examples."""


def num_examples(shapes: Sequence[tuple[int, ...]], dims: ExampleDims) -> int:
    """Returns the number of examples of a batch; 1 if it has none.

    Example:
      >>> num_examples([(), (8, 64, 16), (8, 64)], (None, 1, 1))
      64
    """
    sizes = Counter(shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None)
    return max(sizes, key=lambda size: (sizes[size], size), default=1)


def dims_by_name(leaves: Iterable[Any]) -> ExampleDims:
    """Returns the dim with the examples of each array of a batch, by the names of its dims if it has any.

    An array whose dim 0 has no name, such as the ids of the examples, has them there if the size is theirs.
    """
    leaves = list(leaves)
    shapes = [leaf.shape for leaf in leaves]
    names = [getattr(leaf, "axes", ()) for leaf in leaves]
    named = tuple(axes.index("batch") if "batch" in axes else None for axes in names)
    if not any("batch" in axes for axes in names):
        return most_common(shapes)
    size = num_examples(shapes, named)
    return tuple(
        0 if dim is None and axes[:1] == (None,) and shape[0] == size else dim
        for dim, axes, shape in zip(named, names, shapes, strict=True)
    )


def most_common(shapes: Sequence[tuple[int, ...]]) -> ExampleDims:
    """Returns dim 0 of the arrays of the most common leading size."""
    size = num_examples([shape for shape in shapes if shape], tuple(0 for shape in shapes if shape))
    return tuple(0 if shape and shape[0] == size else None for shape in shapes)


def with_rows(shape: tuple[int, ...], dim: int | None, count: int) -> tuple[int, ...]:
    """Returns the shape of an array of a batch with another number of examples along a dim."""
    return shape if dim is None else (*shape[:dim], count, *shape[dim + 1 :])


def num_if_fewer(shapes: Sequence[tuple[int, ...]], planned: Sequence[tuple[int, ...]], dims: ExampleDims) -> int:
    """Returns the number of examples of a batch that differs from the planned one only in being smaller; else 0.

    Example:
      >>> num_if_fewer([(5, 3), (5,)], [(8, 3), (8,)], (0, 0))
      5
    """
    counts = set[int]()
    for shape, whole, dim in zip(shapes, planned, dims, strict=True):
        if dim is None or len(shape) != len(whole) or with_rows(shape, dim, whole[dim]) != whole:
            return 0
        counts.add(shape[dim])
    return min(counts) if len(counts) == 1 and 0 < min(counts) < num_examples(planned, dims) else 0
