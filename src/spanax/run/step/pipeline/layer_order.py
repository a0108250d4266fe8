"""Rows: in which order the layers of stacked arrays lie, where that is not simply theirs.

A stage of a pipeline keeps a run of rows. Where it has several chunks of the model, those are layers from several
places; where the parts of the model do not divide the layers, some rows are padding. Whoever looks at the state sees
the layers in their order and nothing else. The step itself goes by rows, which is the same for all that treats layers
alike, and refused where something does not.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.errors import SpanaxError
from spanax.hardware.mesh import MeshShape
from spanax.plan.pipeline.layer_partition import Parts
from spanax.plan.pipeline.stages import AXIS
from spanax.plan.plan import Placement, Plan
from spanax.plan.sharding.assign import divided_layers
from spanax.trace.analysis.fusion import REDUCTIONS
from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.graph import CONTRACTIONS, Op
from spanax.trace.pipeline.partition import PipelinePartition
from spanax.trace.program import Program
from spanax.trace.traced import Traced

ALIKE = frozenset(
    {*ELEMENTWISE, *REDUCTIONS, *CONTRACTIONS, "broadcast_in_dim", "reshape", "transpose", "squeeze", "copy"}
)
"""Operations that treat the places along a dim alike, whatever the order they come in."""

PADDING = -1
"""In place of a layer, where a row has none."""


@dataclass(frozen=True)
class Rows:
    """How stacked arrays are kept.

    Attributes:
      label: the class of dims of layers.
      parts: which layers each part of the model has.
      layers: the layer of each row, or PADDING.
      dims: for each leaf the dim of layers, if it has one.
      shapes: of each leaf, as it is kept.
      kept_as: where each leaf is kept.
      shown_as: where each leaf lies with its layers in their order and without padding.
    """

    label: int
    parts: Parts
    layers: tuple[int, ...]
    dims: tuple[int | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    kept_as: tuple[Placement, ...]
    shown_as: tuple[Placement, ...]

    @property
    def is_padded(self) -> bool:
        """Whether some rows have no layer."""
        return PADDING in self.layers

    def kept(self, arrays: Sequence[Any]) -> list[Any]:
        """Leaves whose rows are the layers in their order, as they are kept."""
        return self._taken(arrays, np.asarray(self.layers), self.kept_as)

    def in_order(self, arrays: Sequence[Any]) -> list[Any]:
        """Leaves as they are kept, with the layers in their order."""
        return self._taken(arrays, self._order, self.shown_as)

    def kept_along(self, array: Any, dim: int | None) -> Any:
        """An array under a trace whose layers lie along a dim in their order, if it has any, as it would be kept."""
        return array if dim is None else _rows(array, np.asarray(self.layers), dim)

    def in_order_along(self, array: Any, dim: int | None) -> Any:
        """The other way round."""
        return array if dim is None else _rows(array, self._order, dim)

    def dim(self, traced: Traced, value: int) -> int | None:
        """The dim of layers of a value of a step without padding, by its class."""
        pairs = enumerate(zip(traced.axes.classes[value], traced.graph.shape(value), strict=True))
        wanted = self.label, self.parts.num_layers
        return next((at for at, pair in pairs if pair == wanted), None)

    @property
    def _order(self) -> np.ndarray:
        """The row of each layer."""
        return np.argsort(self.layers, kind="stable")[self.parts.num_short :]

    def _taken(self, arrays: Sequence[Any], order: np.ndarray, places: Sequence[Placement]) -> list[Any]:
        found = []
        for array, dim, place in zip(arrays, self.dims, places, strict=True):
            if dim is None:
                found.append(array)
            elif isinstance(array, jax.core.Tracer):
                found.append(_rows(array, order, dim))
            else:
                found.append(jax.device_put(_compiled_rows(array, order, dim), place.sharding(array.sharding.mesh)))
        return found


def rows_of(program: Program, plan: Plan) -> Rows | None:
    """How the rows of a program lie under a plan; None where that is the layers' order and no more."""
    schedule = plan.schedule
    if schedule.num_stages == 1:
        return None
    (label,) = divided_layers(program)
    axes = program.step.axes
    parts = Parts(axes.ways[label], schedule.num_stages, schedule.num_chunks)
    if schedule.num_chunks == 1 and not parts.num_short:
        return None
    labels = [axes.classes[value] for value in program.step.graph.body.inputs[: len(program.leaves)]]
    dims = tuple(of.index(label) if label in of else None for of in labels)
    shapes = tuple(
        tuple(parts.num_padded if at == dim else size for at, size in enumerate(leaf.shape))
        for leaf, dim in zip(program.leaves, dims, strict=True)
    )
    shown = plan.leaves
    if parts.num_short:
        shown = tuple(_shown(leaf, dim, plan.mesh) for leaf, dim in zip(plan.leaves, dims, strict=True))
    return Rows(label, parts, stage_by_stage(parts), dims, shapes, plan.leaves, shown)


def stage_by_stage(parts: Parts) -> tuple[int, ...]:
    """The layer of each row: those of the first stage first, chunk by chunk.

    Example:
      >>> stage_by_stage(Parts(num_layers=8, num_stages=2, num_chunks=2))
      (0, 1, 4, 5, 2, 3, 6, 7)
      >>> stage_by_stage(Parts(num_layers=6, num_stages=4))
      (0, 1, 2, 3, 4, -1, 5, -1)
    """
    places = [
        (chunk * parts.num_stages + stage) for stage in range(parts.num_stages) for chunk in range(parts.num_chunks)
    ]
    return tuple(
        parts.first_layer(part) + row if row < parts.num_rows - 1 or parts.is_full(part) else PADDING
        for part in places
        for row in range(parts.num_rows)
    )


def check_alike(traced: Traced, pieces: PipelinePartition) -> None:
    """Refuse a step in which something outside of the layers' loop depends on the order that layers come in.

    Raises:
      SpanaxError: something does.
    """
    labels = {traced.axes.classes[value][0] for value in pieces.rows}
    for op in (*traced.graph.body.ops, *pieces.prepared_ops):
        if op is pieces.loop.op or not _along(traced, op, labels):
            continue
        known = [v for v in op.inputs if v in traced.graph.constants and labels.intersection(traced.axes.classes[v])]
        if op.name not in ALIKE or known:
            raise SpanaxError(
                f"`{op.name}` outside of the layers depends on the order in which they come.",
                where="schedule 'interleaved', whose stages have layers from several places",
                fix="schedule '1f1b' or 'zero-bubble'",
            )


def _along(traced: Traced, op: Op, labels: set[int | None]) -> bool:
    return any(labels.intersection(traced.axes.classes[value]) for value in (*op.inputs, *op.outputs))


def _shown(leaf: Placement, dim: int | None, mesh: MeshShape) -> Placement:
    """Where a leaf without padding lies: stages do not divide its layers, so they split the first dim they can."""
    if dim is None or AXIS not in leaf.spec[dim]:
        return leaf
    spec = [tuple(axis for axis in by if axis != AXIS) for by in leaf.spec]
    for at, size in enumerate(leaf.shape):
        if at != dim and size % mesh.ways((*spec[at], AXIS)) == 0:
            spec[at] = (*spec[at], AXIS)
            break
    return replace(leaf, spec=tuple(spec))


def _rows(array: Any, layers: Any, dim: int) -> Any:
    """Rows of an array along a dim, zeros for PADDING; a key has no zero, and is any."""
    taken = jnp.take(array, jnp.maximum(layers, 0), axis=dim)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return taken
    is_layer = (layers >= 0).reshape(-1, *[1] * (array.ndim - dim - 1))
    return jnp.where(is_layer, taken, jnp.zeros((), array.dtype))


@functools.partial(jax.jit, static_argnums=2)
def _compiled_rows(array: Any, layers: Any, dim: int) -> Any:
    return _rows(array, layers, dim)
