"""Supports pipelines whose stages have padded rows: masks padding in the step around the pipeline.

The step is traced again with as many layers as rows, and compared with the original operation by operation. Operations
that are independent for each row also run on padding, reductions over rows mask it, and all others raise an error. The
pipeline itself runs the original step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from spanax.errors import PipelineError, SpanaxError
from spanax.step.pipeline.layer_order import LayerOrder
from spanax.step.replay.replay import Replay
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.axes.retrace import dividing, longer_dim
from spanax.trace.jaxpr.dim_maps.registry import neutral_element
from spanax.trace.jaxpr.dim_maps.relations import Equation
from spanax.trace.jaxpr.graph import BODIES, Op
from spanax.trace.pipeline.partition import PipelinePartition

REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor"}
)
"""Reductions over rows, where the neutral element of the reduction replaces padding."""

SIZES = frozenset({"shape", "new_sizes"})
"""Parameters that only determine the size of a result."""


@dataclass(frozen=True, eq=False)
class PaddedStep:
    """A step whose stacked arrays have padded rows.

    Attributes:
      written: the original step.
      step: the step around the pipeline, with padded rows; its values have the same numbers.
      rows: the row order, with padding.
    """

    written: StepAnalysis
    step: StepAnalysis
    rows: LayerOrder

    def dim(self, value: int) -> int | None:
        """Returns the padded dim of a value; None if it has none.

        Raises:
          SpanaxError: a dim is longer for a reason other than padded rows.
        """
        dim = longer_dim(self.written.graph, self.step.graph, value)
        if dim is not None and self.step.graph.shape(value)[dim] != self.rows.parts.num_padded:
            raise self._unsupported(self.step.graph.producers[value])
        return dim

    def masked(
        self, replay: Replay, written: PipelinePartition, partition: PipelinePartition
    ) -> Mapping[Op, Callable[[Sequence[Any]], list[Any]]]:
        """Returns replacements for operations that must mask padding.

        Args:
          replay: the replay of the step around the pipeline.
          written: the partition of the original step.
          partition: the partition of the padded step.

        Raises:
          SpanaxError: an operation outside of the layers depends on their number or order.
        """
        pairs = [
            *zip(self.written.graph.body.ops, self.step.graph.body.ops, strict=True),
            *zip(written.prepared_ops, partition.prepared_ops, strict=True),
        ]
        # Constants that are equal for all microbatches come from the original step.
        operands = partition.loop.op.inputs[partition.loop.num_consts :]
        if not self._same_constants((*operands, *self.step.graph.body.outputs)):
            raise self._unsupported(partition.loop.op)
        is_layer = np.asarray(self.rows.layers) >= 0
        outer_ops = [
            pair for original, op in pairs if op is not partition.loop.op for pair in self._nested(original, op)
        ]
        fills = {op: self._fills(original, op) for original, op in outer_ops}
        return {op: _with_fills(replay, op, op_fills, is_layer) for op, op_fills in fills.items() if op_fills}

    def _nested(self, original: Op, op: Op) -> Iterator[tuple[Op, Op]]:
        """Yields an operation and those in its bodies, each as a pair of the original and the padded one."""
        if op.bodies and not self._passes_all_rows(op):
            raise self._unsupported(op)
        yield original, op
        for original_body, body in zip(original.bodies, op.bodies, strict=True):
            for pair in zip(original_body.ops, body.ops, strict=True):
                yield from self._nested(*pair)

    def _passes_all_rows(self, op: Op) -> bool:
        """Returns whether the bodies of an operation take all rows at once, unlike a loop over layers."""
        graph = self.step.graph
        wires = graph.wires(op)
        for outer, inner in (*wires.inputs, *wires.outputs):
            dim = self.dim(outer)
            num_scanned = len(graph.shape(outer)) - len(graph.shape(inner))
            if self.dim(inner) != (None if dim is None else dim - num_scanned):
                return False
        return all(self.dim(source) == self.dim(target) for source, target in wires.carried)

    def _fills(self, original: Op, op: Op) -> dict[int, tuple[int, Any]]:
        """Returns for each operand whose padding must not count its padded dim and the fill value."""
        dims, outs = ([self.dim(value) for value in values] for values in (op.inputs, op.outputs))
        has_rows = any(dim is not None for dim in (*dims, *outs))
        by_row = bool(op.bodies) or not has_rows or self._is_by_row(op, dims, outs)
        if not by_row or not self._is_same_op(original, op):
            raise self._unsupported(op)
        if op.name in REDUCTIONS and dims[0] is not None and dims[0] in op.params["axes"]:
            return {0: (dims[0], neutral_element(Equation(op.eqn)))}
        if op.name == "dot_general":
            sides = zip(dims, op.params["dimension_numbers"][0], strict=True)
            return {
                index: (dim, 0)
                for index, (dim, contracted) in enumerate(sides)
                if dim is not None and dim in contracted
            }
        return {}

    def _is_by_row(self, op: Op, dims: Sequence[int | None], outs: Sequence[int | None]) -> bool:
        """Returns whether an operation computes each row from the same row of its operands, or sums rows."""
        if op.name in REDUCTIONS or op.name == "dot_general":
            return True
        rows = [(None,) * len(dims) if out is None else op.dim_map.operand_dims(out, i) for i, out in enumerate(outs)]
        return all(row is not None and all(d in (None, r) for d, r in zip(dims, row, strict=True)) for row in rows)

    def _is_same_op(self, original: Op, op: Op) -> bool:
        """Returns whether an operation equals the original up to sizes."""
        for key, value in op.params.items():
            if key not in SIZES and key not in BODIES.get(op.name, ()) and not _same(original.params[key], value):
                return False
        return self._same_constants((*op.inputs, *(value for body in op.bodies for value in body.outputs)))

    def _same_constants(self, values: Sequence[int]) -> bool:
        """Returns whether the constants among some values equal those of the original step."""
        original = self.written.graph.constants
        padded = self.step.graph.constants
        return all(_same_array(original[value], padded[value]) for value in values if value in padded)

    def _unsupported(self, op: Op) -> SpanaxError:
        parts = self.rows.parts
        return PipelineError(
            f"`{op.name}` outside of the layer loop depends on the number or the order of the layers.",
            where=f"{parts.num_layers} layers in {parts.num_parts} parts of {parts.num_rows} rows, the last "
            f"{parts.num_short} with a row of padding",
            fix=dividing(parts.num_layers),
        )


def _with_fills(
    replay: Replay, op: Op, fills: Mapping[int, tuple[int, Any]], is_layer: np.ndarray
) -> Callable[[Sequence[Any]], list[Any]]:
    def run(ins: Sequence[Any]) -> list[Any]:
        ins = list(ins)
        for index, (dim, fill) in fills.items():
            mask = is_layer.reshape(-1, *[1] * (ins[index].ndim - dim - 1))
            ins[index] = jnp.where(mask, ins[index], jnp.asarray(fill, ins[index].dtype))
        values = dict(zip(op.inputs, ins, strict=True))
        replay.ops([op], values)
        return replay.read(values, op.outputs)

    return run


def _same(first: Any, second: Any) -> bool:
    return first is second or callable(first) or str(first) == str(second)


def _same_array(first: Any, second: Any) -> bool:
    a = np.asarray(first)
    b = np.asarray(second)
    return first is second or ((a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes())
