"""Padding: the step around a pipeline whose stages have rows without a layer.

It is traced anew with as many layers as there are rows, and held against the step as it was written, operation by
operation: what is done to each row alone may do it to padding too, what adds rows up is given none of it, and all else
is refused. What the pipeline itself runs is the step as it was written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from spanax.errors import SpanaxError
from spanax.run.step.pipeline.layer_order import Rows
from spanax.run.step.replay.replay import Replay
from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.graph import BODIES, Op
from spanax.trace.pipeline.partition import PipelinePartition
from spanax.trace.pipeline.retrace import dividing, longer_dim
from spanax.trace.traced import Traced

NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_max": lambda dtype: _least(dtype),
    "reduce_min": lambda dtype: _most(dtype),
    "reduce_and": lambda dtype: _all_ones(dtype),
    "reduce_or": lambda dtype: 0,
    "reduce_xor": lambda dtype: 0,
}
"""What a reduction is given in place of padding: it changes no result."""

SIZES = frozenset({"shape", "new_sizes"})
"""Parameters that say how large a result is, and no more."""


@dataclass(frozen=True, eq=False)
class Padded:
    """A step whose stacked arrays have rows of padding.

    Attributes:
      written: the step as it was written.
      step: the step around the pipeline; its values have the same numbers.
      rows: which rows are padding.
    """

    written: Traced
    step: Traced
    rows: Rows

    def dim(self, value: int) -> int | None:
        """The dim of a value that has padding, if one has.

        Raises:
          SpanaxError: one is longer by something else than rows.
        """
        dim = longer_dim(self.written.graph, self.step.graph, value)
        if dim is not None and self.step.graph.shape(value)[dim] != self.rows.parts.num_padded:
            maker = next(op for op in self.step.graph.ops() if value in op.outputs)
            raise self._refused(maker)
        return dim

    def masked(
        self, replay: Replay, written: PipelinePartition, pieces: PipelinePartition
    ) -> Mapping[Op, Callable[[Sequence[Any]], list[Any]]]:
        """What runs in place of operations that would otherwise take padding for layers.

        Args:
          replay: the step around the pipeline.
          written: the loop of the step as it was written, cut.
          pieces: that of the other.

        Raises:
          SpanaxError: something outside of the layers depends on how many there are, or on their order.
        """
        pairs = [
            *zip(self.written.graph.body.ops, self.step.graph.body.ops, strict=True),
            *zip(written.prepared_ops, pieces.prepared_ops, strict=True),
        ]
        # What is known beforehand and the same for all microbatches is taken as it was written.
        others = pieces.loop.op.inputs[pieces.loop.num_consts :]
        if not self._same_known((*others, *self.step.graph.body.outputs)):
            raise self._refused(pieces.loop.op)
        is_layer = np.asarray(self.rows.layers) >= 0
        around = [each for before, op in pairs if op is not pieces.loop.op for each in self._inside(before, op)]
        fills = {op: self._fills(before, op) for before, op in around}
        return {op: _with_fills(replay, op, of, is_layer) for op, of in fills.items() if of}

    def _inside(self, before: Op, op: Op) -> Iterator[tuple[Op, Op]]:
        """An operation and those that it runs, each as it was written and as it is."""
        if op.bodies and not self._hands_rows_in(op):
            raise self._refused(op)
        yield before, op
        for one, other in zip(before.bodies, op.bodies, strict=True):
            for pair in zip(one.ops, other.ops, strict=True):
                yield from self._inside(*pair)

    def _hands_rows_in(self, op: Op) -> bool:
        """Whether what an operation runs has its rows whole; a loop over layers has one at a time."""
        graph = self.step.graph
        wires = graph.wires(op)
        for outer, inner in (*wires.inputs, *wires.outputs):
            dim, num_taken = self.dim(outer), len(graph.shape(outer)) - len(graph.shape(inner))
            if self.dim(inner) != (None if dim is None else dim - num_taken):
                return False
        return all(self.dim(before) == self.dim(after) for before, after in wires.carried)

    def _fills(self, before: Op, op: Op) -> dict[int, tuple[int, Any]]:
        """For each operand whose padding must not count: the dim of it, and what stands there instead."""
        dims, outs = ([self.dim(value) for value in values] for values in (op.inputs, op.outputs))
        is_along = any(dim is not None for dim in (*dims, *outs))
        by_row = bool(op.bodies) or not is_along or self._is_by_row(op, dims, outs)
        if not by_row or not self._is_known_alike(before, op):
            raise self._refused(op)
        if op.name in NEUTRAL and dims[0] is not None and dims[0] in op.params["axes"]:
            dtype = self.step.graph.avals[op.inputs[0]].dtype
            return {0: (dims[0], NEUTRAL[op.name](dtype))}
        if op.name == "dot_general":
            sides = zip(dims, op.params["dimension_numbers"][0], strict=True)
            return {at: (dim, 0) for at, (dim, summed) in enumerate(sides) if dim is not None and dim in summed}
        return {}

    def _is_by_row(self, op: Op, dims: Sequence[int | None], outs: Sequence[int | None]) -> bool:
        """Whether an operation does the same to each row, whatever the others are, or adds rows up."""
        shape = self.step.graph.shape
        if op.name in NEUTRAL or op.name == "dot_general":
            return True
        if op.name in ELEMENTWISE:
            return all(dim in (None, outs[0]) for dim in dims)
        if op.name == "broadcast_in_dim":
            return dims[0] is None or op.params["broadcast_dimensions"][dims[0]] == outs[0]
        if op.name in ("reshape", "squeeze", "transpose"):
            (before,), (after,) = dims, outs
            if before is None or after is None:
                return False
            if op.name == "transpose":
                return op.params["permutation"][after] == before
            return prod(shape(op.inputs[0])[:before]) == prod(shape(op.outputs[0])[:after])
        return False

    def _is_known_alike(self, before: Op, op: Op) -> bool:
        """Whether an operation is the same with more layers, but for how much it makes."""
        for key, value in op.params.items():
            if key not in SIZES and key not in BODIES.get(op.name, ()) and not _same(before.params[key], value):
                return False
        return self._same_known((*op.inputs, *(value for body in op.bodies for value in body.outputs)))

    def _same_known(self, values: Sequence[int]) -> bool:
        """Whether what is known beforehand of some values is the same with more layers."""
        first, second = self.written.graph.constants, self.step.graph.constants
        return all(_same_array(first[value], second[value]) for value in values if value in second)

    def _refused(self, op: Op) -> SpanaxError:
        parts = self.rows.parts
        return SpanaxError(
            f"`{op.name}` outside of the layers depends on how many there are, or on their order.",
            where=f"{parts.num_layers} layers in {parts.num_parts} parts of {parts.num_rows}, the last "
            f"{parts.num_short} with a row of padding",
            fix=dividing(parts.num_layers),
        )


def _with_fills(
    replay: Replay, op: Op, fills: Mapping[int, tuple[int, Any]], is_layer: np.ndarray
) -> Callable[[Sequence[Any]], list[Any]]:
    def run(ins: Sequence[Any]) -> list[Any]:
        ins = list(ins)
        for at, (dim, fill) in fills.items():
            mask = is_layer.reshape(-1, *[1] * (ins[at].ndim - dim - 1))
            ins[at] = jnp.where(mask, ins[at], jnp.asarray(fill, ins[at].dtype))
        values = dict(zip(op.inputs, ins, strict=True))
        replay.ops([op], values)
        return replay.read(values, op.outputs)

    return run


def _same(first: Any, second: Any) -> bool:
    return first is second or callable(first) or str(first) == str(second)


def _same_array(first: Any, second: Any) -> bool:
    if first is second:
        return True
    one, other = np.asarray(first), np.asarray(second)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()


def _least(dtype: Any) -> Any:
    if dtype == np.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _most(dtype: Any) -> Any:
    if dtype == np.bool_:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _all_ones(dtype: Any) -> Any:
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.unsignedinteger) else -1
