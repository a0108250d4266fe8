"""Associative scans traced as loops over positions, whose carry a step can continue from.

JAX expands an associative scan into a tree of slices and concatenations, which has no carry.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_LOCK = threading.RLock()


@contextmanager
def as_loops() -> Iterator[None]:
    """A context in which `jax.lax.associative_scan` traces a loop with the same results, unless it is reversed.

    Example:
      >>> with as_loops():
      ...     jaxpr = jax.make_jaxpr(lambda x: jax.lax.associative_scan(jnp.add, x))(jnp.ones(8))
      >>> [eqn.primitive.name for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "concatenate")]
      ['scan']
    """
    with _LOCK:
        parallel = lax.associative_scan

        def associative_scan(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
            return parallel(fn, elems, True, axis) if reverse else _loop(fn, elems, axis)

        lax.associative_scan = associative_scan
        try:
            yield
        finally:
            lax.associative_scan = parallel


def _loop(fn: Callable[[Any, Any], Any], elems: Any, axis: int) -> Any:
    rows = jax.tree.map(lambda array: jnp.moveaxis(array, axis, 0), elems)

    def position(carry: Any, row: Any) -> Any:
        is_first, total = carry
        wide = [jax.tree.map(lambda array: jnp.expand_dims(array, axis), each) for each in (total, row)]
        combined = jax.tree.map(lambda array: jnp.squeeze(array, axis), fn(*wide))
        total = jax.tree.map(lambda new, old: jnp.where(is_first, new, old).astype(new.dtype), row, combined)
        return (jnp.zeros((), bool), total), total

    start = jnp.ones((), bool), jax.tree.map(lambda array: jnp.ones_like(array[0]), rows)
    _, totals = lax.scan(position, start, rows)
    return jax.tree.map(lambda array: jnp.moveaxis(array, 0, axis), totals)
