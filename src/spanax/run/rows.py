"""Rows: in which order the layers of stacked arrays lie, where a stage of a pipeline has several chunks of the model.

A stage keeps a run of rows, and its chunks are layers from several places: so rows are kept stage by stage, and are put
in the layers' order for whoever looks at the state. The step itself goes by rows, which is the same for all that treats
layers alike, and refused where something does not.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.errors import SpanaxError
from spanax.plan.plan import Plan
from spanax.plan.stages import AXIS
from spanax.trace.axes import CONTRACTIONS
from spanax.trace.cut import Cut
from spanax.trace.fusion import REDUCTIONS
from spanax.trace.graph import Op
from spanax.trace.primitives import ELEMENTWISE
from spanax.trace.traced import Traced

ALIKE = frozenset(
    {*ELEMENTWISE, *REDUCTIONS, *CONTRACTIONS, "broadcast_in_dim", "reshape", "transpose", "squeeze", "copy"}
)
"""Operations that treat the places along a dim alike, whatever the order they come in."""


@dataclass(frozen=True)
class Rows:
    """How stacked arrays are kept: `layers` has the layer of each row, `dims` for each leaf the dim, if it has one."""

    layers: tuple[int, ...]
    dims: tuple[int | None, ...]

    def kept(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays whose rows are the layers in their order, as they are kept."""
        return self._taken(arrays, np.asarray(self.layers))

    def in_order(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays as they are kept, with the layers in their order."""
        return self._taken(arrays, np.argsort(self.layers))

    def _taken(self, arrays: Sequence[Any], order: np.ndarray) -> list[Any]:
        pairs = zip(arrays, self.dims, strict=True)
        return [array if dim is None else _take(array, order, dim) for array, dim in pairs]


def rows_of(plan: Plan) -> Rows | None:
    """The order of rows under a plan; None where it is the layers' own."""
    schedule = plan.schedule
    if schedule.num_stages == 1 or schedule.num_chunks == 1:
        return None
    dims = tuple(next((dim for dim, by in enumerate(leaf.spec) if AXIS in by), None) for leaf in plan.leaves)
    sizes = {leaf.shape[dim] for leaf, dim in zip(plan.leaves, dims, strict=True) if dim is not None}
    (num_layers,) = sizes
    return Rows(stage_by_stage(num_layers, schedule.num_stages, schedule.num_chunks), dims)


def stage_by_stage(num_layers: int, num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """The layer of each row: those of the first stage first, chunk by chunk.

    Example:
      >>> stage_by_stage(num_layers=8, num_stages=2, num_chunks=2)
      (0, 1, 4, 5, 2, 3, 6, 7)
    """
    chunks = np.arange(num_layers).reshape(num_chunks, num_stages, -1)
    return tuple(chunks.swapaxes(0, 1).ravel().tolist())


def check_alike(traced: Traced, pieces: Cut) -> None:
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


def _take(array: Any, order: np.ndarray, dim: int) -> Any:
    if isinstance(array, jax.core.Tracer):
        return jnp.take(array, order, axis=dim)
    return jax.device_put(_taken_along(array, order, dim), array.sharding)


@functools.partial(jax.jit, static_argnums=2)
def _taken_along(array: Any, order: Any, dim: int) -> Any:
    return jnp.take(array, order, axis=dim)
