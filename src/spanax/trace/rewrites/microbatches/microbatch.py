"""Evaluates a loss on a subset of the examples, with the constants and the noise of the full batch."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp

from spanax.trace.jaxpr.graph import Body, Graph, Op
from spanax.trace.jaxpr.interpret import Values, evaluate, read, rebuilt, run
from spanax.trace.rewrites.microbatches.flow import draws, is_changed
from spanax.trace.rewrites.microbatches.noise import drawn


@dataclass(frozen=True, eq=False)
class Microbatch:
    """A loss that is evaluated on one microbatch: shapes are those of the microbatch, constants those of the batch.

    Attributes:
      full, small: the loss for the batch and for a microbatch, with the same value numbers.
      index, count: which microbatch it is, of how many.
      batch_size: the number of examples in the batch.
      is_tiled: the layout of noise, as in `Equation`.
    """

    full: Graph
    small: Graph
    index: Any
    count: int
    batch_size: int
    is_tiled: bool

    @cached_property
    def _graph(self) -> Graph:
        shared = {value: const for value, const in self.full.constants.items() if not self._is_sized(value)}
        return replace(self.small, constants=self.small.constants | shared)

    @cached_property
    def _full_ops(self) -> dict[Op, Op]:
        return dict(zip(self.small.ops(), self.full.ops(), strict=True))

    def evaluate(self, results: Sequence[int], values: Values, ahead: Container[int]) -> list[Any]:
        """Returns results, given the inputs and the values that are computed ahead for the full batch."""
        graph = self._graph
        values = dict(values)
        run(graph, graph.slice(results, ahead), values, self._override)
        return read(graph, values, results)

    def _override(self, op: Op, ins: Sequence[Any]) -> list[Any] | None:
        full_op = self._full_ops[op]
        if draws(self.full, self.small, full_op):
            return drawn(full_op, ins, [self._rows(value) for value in op.outputs], self.index, self.count)
        bodies = zip(full_op.bodies, op.bodies, strict=True)
        if not any(is_changed(self.full, self.small, *pair) for pair in bodies):
            return None
        return rebuilt(self.full, op, ins, [partial(self._body, body) for body in op.bodies])

    def _body(self, body: Body, *args: Any) -> list[Any]:
        outs = evaluate(self._graph.within(body), args, self._override)
        avals = [self.small.avals[value] for value in body.outputs]
        return [
            jnp.asarray(out, aval.dtype) if jnp.ndim(out) == 0 and not hasattr(out, "dtype") else out
            for out, aval in zip(outs, avals, strict=True)
        ]

    def _is_sized(self, value: int) -> bool:
        return self.full.shape(value) != self.small.shape(value)

    def _rows(self, value: int) -> tuple[int, int] | None:
        """Returns the example dim of a draw, and the elements per example along it."""
        pairs = enumerate(zip(self.full.shape(value), self.small.shape(value), strict=True))
        dim = next(((dim, size) for dim, (size, small_size) in pairs if size != small_size), None)
        return None if dim is None else (dim[0], 1 if self.is_tiled else dim[1] // self.batch_size)
