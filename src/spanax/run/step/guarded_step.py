"""Guarded: what a guard adds to a compiled step, and the one pass that finds a state unfit to be kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spanax.run.step.guard import SKIP, WATCHED, Guard
from spanax.run.step.pipeline.layer_order import LayerOrder
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class GuardedStep:
    """A step that says whether its numbers are good and, with `skip`, changes nothing where they are not.

    Attributes:
      guard: what is asked for.
      watched: the watched metrics, and where each comes among what the step returns.
      params: leaves that are looked at themselves: the parameters of a step that returns no gradient norm.
      rows: how the rows of stacked arrays are kept, where that is not the layers' order.
    """

    guard: Guard
    watched: dict[str, int]
    params: tuple[int, ...]
    rows: LayerOrder | None

    @staticmethod
    def of(guard: Guard | None, program: Program, rows: LayerOrder | None) -> "GuardedStep | None":
        """What is to be added; None where what the step returns says all, and whoever takes it decides."""
        if guard is None:
            return None
        watched = _watched(program)
        looked_at = () if "grad_norm" in watched else _of_kind(program, "param")
        return GuardedStep(guard, watched, looked_at, rows) if guard.policy == SKIP or looked_at else None

    def finish(
        self, before: Sequence[Any], after: Sequence[Any], metrics: Sequence[Any], limits: Any
    ) -> tuple[list[Any], list[Any]]:
        """The state after the step, and its metrics with `step_ok` behind them.

        Args:
          before: the state as the step took it.
          after: as it left it.
          metrics: what it returns.
          limits: of shape [watched].
        """
        is_ok = jnp.bool_(True)
        for at, place in enumerate(self.watched.values()):
            value = metrics[place].astype(jnp.float32)
            is_ok &= jnp.isfinite(value) & ~(value > limits[at])
        for leaf in self.params:
            is_ok &= self._is_finite(leaf, after[leaf])
        if self.guard.policy == SKIP:
            after = [jnp.where(is_ok, new, old) for new, old in zip(after, before, strict=True)]
        return list(after), [*metrics, is_ok]

    def _is_finite(self, leaf: int, array: Any) -> Any:
        dim = None if self.rows is None else self.rows.dims[leaf]
        if dim is None:
            return jnp.isfinite(array).all()
        # Padding may hold anything: an optimizer that divides by a norm makes a NaN of its zeros.
        by_row = jnp.isfinite(array).all(axis=tuple(at for at in range(array.ndim) if at != dim))
        assert self.rows is not None
        return self.rows.in_order_along(by_row, 0).all()


def unsound(program: Program, rows: LayerOrder | None, state: Sequence[Any]) -> Any:
    """For each leaf whether it must not be kept, under a trace: parameters that are not finite, a NaN in other state.

    An infinity is a mask, or the best value so far, as often as a number that went wrong.
    """
    state = state if rows is None else rows.in_order(state)

    def is_bad(kind: str, array: Any) -> Any:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return jnp.bool_(False)
        return ~jnp.isfinite(array).all() if kind == "param" else jnp.isnan(array).any()

    return jnp.stack([is_bad(leaf.kind, array) for leaf, array in zip(program.leaves, state, strict=True)])


def _watched(program: Program) -> dict[str, int]:
    """The watched metrics among the step's results."""
    step = program.step
    values = step.graph.body.outputs[len(program.leaves) :]
    places = jax.tree.unflatten(step.result, range(len(values)))

    def is_number(place: Any) -> bool:
        aval = step.graph.avals[values[place]] if isinstance(place, int) else None
        return aval is not None and aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating)

    return {name: places[name] for name in WATCHED if is_number(places.get(name))}


def _of_kind(program: Program, kind: str) -> tuple[int, ...]:
    pairs = enumerate(program.leaves)
    return tuple(at for at, leaf in pairs if leaf.kind == kind and jnp.issubdtype(leaf.dtype, jnp.inexact))
