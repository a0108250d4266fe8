"""Operations along the sequence of which a row depends on a few rows: shifts, paddings and causal convolutions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from spanax.trace.jaxpr.graph import Graph, Op


@dataclass(frozen=True)
class Window:
    """Rows of a value along a dim: `size` of them, from `low` after the position; those outside of it do not exist."""

    value: int
    dim: int
    low: int
    size: int = 1

    def read(self, array: Any, position: Any) -> tuple[Any, Any]:
        """Returns the rows, and whether each exists, with the rank of the array."""
        indices = position + self.low + jnp.arange(self.size, dtype=jnp.int32)
        exists = (indices >= 0) & (indices < array.shape[self.dim])
        rows = jnp.take(array, jnp.clip(indices, 0, array.shape[self.dim] - 1), axis=self.dim)
        shape = [self.size if dim == self.dim else 1 for dim in range(array.ndim)]
        return rows, exists.reshape(shape)


def windows(graph: Graph, op: Op, dim: int) -> tuple[Window, ...] | None:
    """Returns the windows of its first operands from which an operation computes a row along a dim of its result.

    Returns None for other operations.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> x = jax.ShapeDtypeStruct((4, 3), "float32")
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0))))(x))
      >>> pad = graph.producers[graph.body.outputs[0]]
      >>> [(window.value == graph.body.inputs[0], window.low) for window in windows(graph, pad, 0)]
      [(True, -1)]
    """
    found: list[Window] = []
    if op.name == "slice":
        strides = op.params["strides"] or (1,) * len(op.params["start_indices"])
        if strides[dim] == 1:
            found = [Window(op.inputs[0], dim, op.params["start_indices"][dim])]
    elif op.name == "pad":
        config = op.params["padding_config"]
        if all(each == (0, 0, 0) for other, each in enumerate(config) if other != dim) and config[dim][2] == 0:
            found = [Window(op.inputs[0], dim, -int(config[dim][0]))]
    elif op.name == "concatenate" and op.params["dimension"] == dim:
        offset = 0
        for value in op.inputs:
            found.append(Window(value, dim, -offset))
            offset += graph.shape(value)[dim]
        if any(graph.shape(value)[dim] == 0 for value in op.inputs):
            return None
    elif op.name == "conv_general_dilated":
        found = _of_convolution(graph, op, dim)
    return tuple(_before_slices(graph, window) for window in found) or None


def _of_convolution(graph: Graph, op: Op, dim: int) -> list[Window]:
    spec = op.params["dimension_numbers"]
    if dim not in spec.out_spec[2:]:
        return []
    place = spec.out_spec[2:].index(dim)
    if op.params["window_strides"][place] != 1 or op.params["lhs_dilation"][place] != 1:
        return []
    reach = (graph.shape(op.inputs[1])[spec.rhs_spec[2 + place]] - 1) * op.params["rhs_dilation"][place]
    return [Window(op.inputs[0], spec.lhs_spec[2 + place], -op.params["padding"][place][0], reach + 1)]


def _before_slices(graph: Graph, window: Window) -> Window:
    """Returns the window of the value that slices along its dim were taken of: a slice of a cache would copy it."""
    op = graph.producers.get(window.value)
    if op is None or op.name != "slice" or window.low > 0:
        return window
    shape = graph.shape(window.value)
    source = graph.shape(op.inputs[0])
    is_only = all(size == shape[dim] for dim, size in enumerate(source) if dim != window.dim)
    starts_first = op.params["start_indices"][window.dim] == 0 and not op.params["strides"]
    # The rows that the slice leaves out must be later ones than the position.
    is_past = window.low + window.size <= shape[window.dim] - source[window.dim] + 1
    return Window(op.inputs[0], window.dim, window.low, window.size) if is_only and starts_first and is_past else window


def row_of(op: Op, found: Sequence[Window], ins: Sequence[Any], dim: int, position: Any) -> Any:
    """Returns the row of the result at a position along a dim, from whole operands."""
    read = [window.read(array, position) for window, array in zip(found, ins, strict=False)]
    rows, exists = read[0]
    if op.name == "slice":
        starts = [0 if each == dim else start for each, start in enumerate(op.params["start_indices"])]
        limits = [1 if each == dim else limit for each, limit in enumerate(op.params["limit_indices"])]
        return lax.slice(rows, starts, limits, op.params["strides"])
    if op.name == "pad":
        return jnp.where(exists, rows, ins[1])
    if op.name == "concatenate":
        for more, is_there in read[1:]:
            rows = jnp.where(is_there, more, rows)
        return rows
    spec = op.params["dimension_numbers"]
    place = spec.out_spec[2:].index(dim)
    padding = [(0, 0) if each == place else pair for each, pair in enumerate(op.params["padding"])]
    rows = jnp.where(exists, rows, jnp.zeros((), rows.dtype))
    return op.bind([rows, *ins[1:]], {**op.params, "padding": tuple(padding)})[0]
