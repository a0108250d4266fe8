"""Callbacks of a program on simulated devices, whose errors are raised when the program has ended.

A callback that raises ends the program of its device only. The others wait for that device in the next collective,
until XLA aborts the process (jax 0.10.2 and 0.12.0).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spanax.trace.jaxpr.graph import Graph, Op

_ERRORS: list[Exception] = []


@dataclass(frozen=True)
class DeferredCallback:
    """A callback that returns zeros if it raises.

    Attributes:
      callback: the callback.
      results: the shapes and dtypes of its results.
    """

    callback: Callable[..., Any]
    results: tuple[Any, ...]

    def __call__(self, *args: Any) -> Any:
        try:
            return self.callback(*args)
        except Exception as error:
            _ERRORS.append(error)
            return [np.zeros(aval.shape, aval.dtype) for aval in self.results]


def is_callback(op: Op) -> bool:
    """Returns whether an operation calls a Python function when the program runs."""
    return op.name.endswith("callback") and "callback" in op.params


def with_deferred_errors(graph: Graph, op: Op, ins: Any) -> list[Any]:
    """Evaluates a callback so that its error is raised by `raise_deferred`."""
    results = tuple(graph.avals[value] for value in op.outputs)
    return op.bind(ins, op.params | {"callback": DeferredCallback(op.params["callback"], results)})


def raise_deferred() -> None:
    """Raises the error of a callback in a program that has ended, as JAX does.

    Raises:
      JaxRuntimeError: a callback raised.
    """
    if _ERRORS:
        error = _ERRORS[0]
        _ERRORS.clear()
        raise jax.errors.JaxRuntimeError(
            f"INTERNAL: error calling callback: {type(error).__name__}: {error}"
        ) from error
