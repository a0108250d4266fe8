"""Windows of convolutions and pools, and the rows that a shard of a dim under windows reads from its neighbors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spanax.trace.jaxpr.dim_maps.relations import Dim, Equation

POOLS = frozenset({"reduce_window_sum", "reduce_window_max", "reduce_window_min"})

POOL_GRADIENT = "select_and_scatter_add"
"""The gradient of a maximum: its operands are the rows' gradients, then what the windows read."""

WINDOWED = POOLS | {POOL_GRADIENT, "conv_general_dilated"}


def num_pairs(sizes: tuple[int, int, int], stride: int, low: int, dilations: tuple[int, int]) -> int:
    """Returns the number of pairs of a row and an element of its window that is an element of the dim, not padding.

    Arguments are as in `Window`.
    """
    size, width, num_rows = sizes
    of_dim, of_window = dilations
    positions = np.arange(num_rows)[:, None] * stride - low + np.arange(width) * of_window
    return int(((positions >= 0) & (positions <= (size - 1) * of_dim) & (positions % of_dim == 0)).sum())


@dataclass(frozen=True)
class Halo:
    """The rows that a shard reads of the shards before and after it, and the padding around these that remains."""

    before: int
    after: int
    padding: tuple[int, int]

    @property
    def size(self) -> int:
        """The number of rows of the neighbors."""
        return self.before + self.after


@dataclass(frozen=True)
class Window:
    """A dim over which windows slide.

    Attributes:
      index: its index in the parameters.
      read: the dim that the windows read.
      kernel: the dim of the kernel; None for a pool.
      rows: the dim with one row for each window.
      sizes: the sizes of the dim, of a window and of the rows.
      stride: the elements of the dim between two windows, holes included.
      low: the padding before the dim.
      dilations: one more than the holes between elements of the dim, and of a window.
    """

    index: int
    read: Dim
    kernel: Dim | None
    rows: Dim
    sizes: tuple[int, int, int]
    stride: int
    low: int
    dilations: tuple[int, int]

    @cached_property
    def num_products(self) -> int:
        """The number of pairs of a row and an element of its window that is an element of the dim, not padding."""
        return num_pairs(self.sizes, self.stride, self.low, self.dilations)

    def halo(self, ways: int, is_summed: bool) -> Halo | None:
        """Returns the halo of one of `ways` shards of the dim and of the rows; None if one neighbor does not have it.

        With `is_summed`, the kernel is sharded instead of the rows, and the rows of shards are terms of a sum.

        Example:
          >>> same = Window(0, (0, 1), (1, 0), (2, 1), (32, 3, 32), 1, 1, (1, 1))
          >>> same.halo(4, False)
          Halo(before=1, after=1, padding=(0, 0))
        """
        size, width, num_rows = self._shard(ways, is_summed)
        of_dim, of_window = self.dilations
        step = width * of_window if is_summed else num_rows * self.stride
        if any(whole % ways for whole in (self.sizes[0], self.sizes[1 if is_summed else 2])) or step != size * of_dim:
            return None
        last = (num_rows - 1) * self.stride + (width - 1) * of_window - self.low
        before = max(0, self.low // of_dim)
        after = max(0, last // of_dim - (size - 1))
        low = self.low - before * of_dim
        high = last - (size + after - 1) * of_dim
        if not is_summed and -self.stride < high < 0:
            high = 0  # between two windows
        return Halo(before, after, (low, high)) if max(before, after) <= size else None

    def excess(self, ways: int, is_summed: bool, halo: Halo) -> float:
        """Returns the products of all shards over those of the whole: shards multiply the zeros of outer halos."""
        size, width, num_rows = self._shard(ways, is_summed)
        extended = (size + halo.size, width, num_rows)
        return ways * num_pairs(extended, self.stride, halo.padding[0], self.dilations) / self.num_products

    def _shard(self, ways: int, is_summed: bool) -> tuple[int, int, int]:
        size, width, num_rows = self.sizes
        return (size // ways, width // ways, num_rows) if is_summed else (size // ways, width, num_rows // ways)


def windows(equation: Equation) -> Iterator[Window]:
    """Yields the dims over which the windows of a convolution or a pool slide."""
    params = equation.params
    if equation.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
        dilations = list(zip(params["lhs_dilation"], params["rhs_dilation"], strict=True))
        for index, dims in enumerate(spatial):
            read, kernel, rows = enumerate(dims)
            sizes = tuple(equation.shapes[array][dim] for array, dim in (read, kernel, rows))
            stride = params["window_strides"][index]
            low, _ = params["padding"][index]
            yield Window(index, read, kernel, rows, sizes, stride, low, dilations[index])  # type: ignore[arg-type]
    elif equation.name in WINDOWED:
        read_array, rows_array = (1, 0) if equation.name == POOL_GRADIENT else (0, 1)
        rank = len(equation.shapes[0])
        of_dims, of_windows = (params.get(name) or (1,) * rank for name in ("base_dilation", "window_dilation"))
        for dim, (width, stride) in enumerate(zip(params["window_dimensions"], params["window_strides"], strict=True)):
            if width > 1 or stride > 1:
                sizes = equation.shapes[read_array][dim], width, equation.shapes[rows_array][dim]
                low = int(params["padding"][dim][0])
                holes = of_dims[dim], of_windows[dim]
                yield Window(dim, (read_array, dim), None, (rows_array, dim), sizes, stride, low, holes)


def num_products(equation: Equation) -> int:
    """Returns the number of pairs of a result and an element of its window, over all dims under windows."""
    return math.prod(window.num_products for window in windows(equation))
