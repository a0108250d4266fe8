"""The jaxpr of a pure function, traced once for all variants that rewrite it."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any

import jax

Known = dict[Any, tuple[Any, Any]]
"""The jaxpr of a function and the structure of its results, by the structure and the types of its arguments."""


@dataclass(frozen=True, eq=False)
class TracedLoss:
    """What was traced of a loss in one dtype, by its context: as written, or with attention fused.

    Attributes:
      known: the jaxprs.
      attentions: the outcome for each attention.
      update: the update of model and optimizer by gradients, traced once; None runs it each time.
    """

    known: dict[str, Known] = field(default_factory=lambda: defaultdict(dict))
    attentions: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    update: Callable[..., Any] | None = None


class TracedOnce:
    """A pure function whose jaxpr is read from other copies of the function, if one has been traced.

    Args:
      function: takes and returns pytrees of arrays.
      known: what was traced; all functions that share it must be equal.
    """

    def __init__(self, function: Callable[..., Any], known: Known):
        self._function = function
        self._known = known
        update_wrapper(self, function)  # JAX names it in errors

    def __call__(self, *args: Any) -> Any:
        """Returns what the function returns."""
        return self._function(*args)

    def jaxpr(self, *args: Any) -> tuple[Any, Any]:
        """Returns the jaxpr of the function, and its results with shapes as leaves."""
        leaves, treedef = jax.tree.flatten(args)
        key = treedef, *map(jax.typeof, leaves)
        if key not in self._known:
            try:
                closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(*args)
            except Exception:
                self._function(*args)  # raises it again, in a trace that has the user's names of arguments
                raise
            if any(isinstance(value, jax.core.Tracer) for value in closed.consts):
                return closed, shapes  # an array of the enclosing function, which another trace cannot read
            self._known[key] = closed, shapes
        return self._known[key]


def jaxpr_of(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Returns the jaxpr of a function, and its results with shapes as leaves.

    Example:
      >>> known = {}
      >>> [str(jaxpr_of(TracedOnce(lambda x: 2 * x, known), 1.0)[0].out_avals) for _ in range(2)], len(known)
      (['[ShapedArray(float32[], weak_type=True)]', '[ShapedArray(float32[], weak_type=True)]'], 1)
    """
    if isinstance(function, TracedOnce):
        return function.jaxpr(*args)
    traced: tuple[Any, Any] = jax.make_jaxpr(function, return_shape=True)(*args)
    return traced
