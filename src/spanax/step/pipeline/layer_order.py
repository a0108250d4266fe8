"""Orders the rows of stacked layers so that each pipeline stage stores a contiguous block of rows.

If a stage has several chunks, its layers come from several places of the model; if the number of parts does not divide
the number of layers, some rows are padding. The public state always has the layers in their order. The step itself
operates on rows, which is equivalent as long as every operation treats all layers alike; others raise an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.hardware.mesh import MeshShape
from spanax.plan.pipeline.stages import AXIS
from spanax.plan.plan import Plan
from spanax.plan.sharding.assign import divided_layers
from spanax.plan.sharding.layer_partition import Parts
from spanax.plan.sharding.placement import DEVICE, Placement
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.program import Program

PADDING = -1
"""Marks a row without a layer."""


@dataclass(frozen=True)
class LayerOrder:
    """The order of layers in the rows of stacked arrays.

    Attributes:
      label: the class of layer dims.
      parts: the partition of the layers over stages and chunks.
      layers: the layer of each row, or PADDING.
      dims: the layer dim of each leaf, or None.
      shapes: the shape of each leaf, with padding.
      row_placements: the placement of each leaf with its rows stage by stage.
      layer_placements: the placement of each leaf with its layers in order, without padding.
    """

    label: int
    parts: Parts
    layers: tuple[int, ...]
    dims: tuple[int | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    row_placements: tuple[Placement, ...]
    layer_placements: tuple[Placement, ...]

    @property
    def is_padded(self) -> bool:
        """Whether some rows have no layer."""
        return PADDING in self.layers

    def to_rows(self, arrays: Sequence[Any]) -> list[Any]:
        """Reorders leaves from layer order to row order."""
        return self._reordered(arrays, np.asarray(self.layers), self.row_placements)

    def to_layers(self, arrays: Sequence[Any]) -> list[Any]:
        """Reorders leaves from row order to layer order."""
        return self._reordered(arrays, self._order, self.layer_placements)

    def to_rows_along(self, array: Any, dim: int | None) -> Any:
        """Reorders a traced array along its layer dim, if any, from layer order to row order."""
        return array if dim is None else _rows(array, np.asarray(self.layers), dim)

    def to_layers_along(self, array: Any, dim: int | None) -> Any:
        """Reorders a traced array along its layer dim, if any, from row order to layer order."""
        return array if dim is None else _rows(array, self._order, dim)

    def dim(self, traced: StepAnalysis, value: int) -> int | None:
        """Returns the layer dim of a value of a step without padding; None if it has none."""
        pairs = enumerate(zip(traced.axes.classes[value], traced.graph.shape(value), strict=True))
        layer_dim = self.label, self.parts.num_layers
        return next((dim for dim, pair in pairs if pair == layer_dim), None)

    @property
    def _order(self) -> np.ndarray:
        """The row of each layer."""
        return np.argsort(self.layers, kind="stable")[self.parts.num_short :]

    def _reordered(self, arrays: Sequence[Any], order: np.ndarray, placements: Sequence[Placement]) -> list[Any]:
        leaves = []
        for array, dim, placement in zip(arrays, self.dims, placements, strict=True):
            if dim is None:
                leaves.append(array)
            elif isinstance(array, jax.core.Tracer):
                leaves.append(_rows(array, order, dim))
            else:
                array = jax.device_put(array, array.sharding.with_memory_kind(DEVICE))
                leaves.append(
                    jax.device_put(_compiled_rows(array, order, dim), placement.sharding(array.sharding.mesh))
                )
        return leaves


def layer_order(program: Program, plan: Plan) -> LayerOrder | None:
    """Returns the row order of a program under a plan; None if it equals the layer order without padding."""
    schedule = plan.schedule
    if schedule.num_stages == 1:
        return None
    (label,) = divided_layers(program)
    axes = program.step.axes
    parts = Parts(axes.ways[label], schedule.num_stages, schedule.num_chunks)
    if schedule.num_chunks == 1 and not parts.num_short:
        return None
    labels = [axes.classes[value] for value in program.step.graph.body.inputs[: len(program.leaves)]]
    dims = tuple(dim_labels.index(label) if label in dim_labels else None for dim_labels in labels)
    shapes = tuple(
        tuple(parts.num_padded if axis == dim else size for axis, size in enumerate(leaf.shape))
        for leaf, dim in zip(program.leaves, dims, strict=True)
    )
    layer_placements = plan.leaves
    if parts.num_short:
        layer_placements = tuple(
            _layer_placement(leaf, dim, plan.mesh) for leaf, dim in zip(plan.leaves, dims, strict=True)
        )
    return LayerOrder(label, parts, layers_by_stage(parts), dims, shapes, plan.leaves, layer_placements)


def layers_by_stage(parts: Parts) -> tuple[int, ...]:
    """Returns the layer of each row: first all rows of the first stage, chunk by chunk.

    Example:
      >>> layers_by_stage(Parts(num_layers=8, num_stages=2, num_chunks=2))
      (0, 1, 4, 5, 2, 3, 6, 7)
      >>> layers_by_stage(Parts(num_layers=6, num_stages=4))
      (0, 1, 2, 3, 4, -1, 5, -1)
    """
    parts_by_stage = [
        (chunk * parts.num_stages + stage) for stage in range(parts.num_stages) for chunk in range(parts.num_chunks)
    ]
    return tuple(
        parts.first_layer(part) + row if row < parts.num_rows - 1 or parts.is_full(part) else PADDING
        for part in parts_by_stage
        for row in range(parts.num_rows)
    )


def _layer_placement(leaf: Placement, dim: int | None, mesh: MeshShape) -> Placement:
    """Returns the placement of a leaf in layer order: `pipe` shards the first other dim that it divides."""
    if dim is None or AXIS not in leaf.spec[dim]:
        return leaf
    spec = [tuple(axis for axis in dim_axes if axis != AXIS) for dim_axes in leaf.spec]
    for axis_index, size in enumerate(leaf.shape):
        if axis_index != dim and size % mesh.ways((*spec[axis_index], AXIS)) == 0:
            spec[axis_index] = (*spec[axis_index], AXIS)
            break
    return replace(leaf, spec=tuple(spec))


def _rows(array: Any, layers: Any, dim: int) -> Any:
    """Takes rows of an array along a dim: zeros for PADDING, or any key in an array of PRNG keys."""
    rows = jnp.take(array, jnp.maximum(layers, 0), axis=dim)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return rows
    is_layer = (layers >= 0).reshape(-1, *[1] * (array.ndim - dim - 1))
    return jnp.where(is_layer, rows, jnp.zeros((), array.dtype))


_compiled_rows = jax.jit(_rows, static_argnums=2)
