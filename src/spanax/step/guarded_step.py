"""Adds the checks of a guard to a compiled step, and finds leaves that must not be checkpointed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spanax.errors import StepError
from spanax.step.guard import SKIP, WATCHED, Guard
from spanax.step.pipeline.layer_order import LayerOrder
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class GuardedStep:
    """Extends a step to report whether it is good and, with policy `skip`, to leave the state unchanged if not.

    Attributes:
      guard: the guard.
      watched: for each watched metric, its index among the outputs of the step.
      params: leaves to check for finite values: all parameters, if the step returns no gradient norm.
      rows: the row order of stacked arrays, if it differs from the order of the layers.
    """

    guard: Guard
    watched: dict[str, int]
    params: tuple[int, ...]
    rows: LayerOrder | None

    @staticmethod
    def of(guard: Guard | None, program: Program, rows: LayerOrder | None) -> "GuardedStep | None":
        """Returns the extension for a step; None if the host can decide from the metrics alone."""
        if guard is None:
            return None
        watched = _watched(program, guard.metrics)
        if missing := [name for name in guard.metrics if name not in (*watched, *WATCHED)]:
            raise StepError(f"the step returns no scalar '{missing[0]}', which the guard checks.")
        params = () if "grad_norm" in watched else _of_kind(program, "param")
        return GuardedStep(guard, watched, params, rows) if guard.policy == SKIP or params else None

    def finish(
        self, before: Sequence[Any], after: Sequence[Any], metrics: Sequence[Any], limits: Any
    ) -> tuple[list[Any], list[Any]]:
        """Returns the state after the step, and its metrics with `step_ok` appended.

        Args:
          before: the state before the step.
          after: the state that the step computed.
          metrics: the outputs of the step.
          limits: float32 array of shape [watched].
        """
        is_ok = jnp.bool_(True)
        for index, output in enumerate(self.watched.values()):
            value = metrics[output].astype(jnp.float32)
            is_ok &= jnp.isfinite(value) & ~(value > limits[index])
        for leaf in self.params:
            is_ok &= self._is_finite(leaf, after[leaf])
        if self.guard.policy == SKIP:
            after = [jnp.where(is_ok, new, old) for new, old in zip(after, before, strict=True)]
        return list(after), [*metrics, is_ok]

    def _is_finite(self, leaf: int, array: Any) -> Any:
        dim = None if self.rows is None else self.rows.dims[leaf]
        if dim is None:
            return jnp.isfinite(array).all()
        # Padding is unspecified: an optimizer that divides by a norm turns its zeros into NaN.
        by_row = jnp.isfinite(array).all(axis=tuple(axis for axis in range(array.ndim) if axis != dim))
        assert self.rows is not None
        return self.rows.to_layers_along(by_row, 0).all()


def invalid_leaves(program: Program, rows: LayerOrder | None, state: Sequence[Any]) -> Any:
    """Returns for each leaf whether it must not be checkpointed: a non-finite parameter, or a NaN in other state.

    Call it under a trace. An infinity in other state is valid: it may be a mask, or the initial value of a minimum.
    """
    state = state if rows is None else rows.to_layers(state)

    def is_bad(kind: str, array: Any) -> Any:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return jnp.bool_(False)
        return ~jnp.isfinite(array).all() if kind == "param" else jnp.isnan(array).any()

    return jnp.stack([is_bad(leaf.kind, array) for leaf, array in zip(program.leaves, state, strict=True)])


def _watched(program: Program, names: Sequence[str]) -> dict[str, int]:
    """Returns the output index of each of these metrics that the step returns as a floating-point scalar."""
    step = program.step
    values = step.graph.body.outputs[len(program.leaves) :]
    indices = jax.tree.unflatten(step.result, range(len(values)))

    def is_number(index: Any) -> bool:
        aval = step.graph.avals[values[index]] if isinstance(index, int) else None
        return aval is not None and aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating)

    return {name: indices[name] for name in names if is_number(indices.get(name))}


def _of_kind(program: Program, kind: str) -> tuple[int, ...]:
    pairs = enumerate(program.leaves)
    return tuple(index for index, leaf in pairs if leaf.kind == kind and jnp.issubdtype(leaf.dtype, jnp.inexact))
