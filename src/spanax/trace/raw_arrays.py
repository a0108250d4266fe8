"""Carries plain arrays (attributes that are not Variables) as state, as NNX does."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import jax
from flax import nnx
from flax.nnx import pytreelib


@contextmanager
def traced_as_data() -> Iterator[None]:
    """Registers tracers as data, so that attributes with traced arrays are state as concrete arrays are.

    Flax 0.12 decides by the type of a value whether an attribute is data, and treats a tracer as static: it is not
    state then and leaks with the graph definition, and a constructor under `nnx.vmap` does not stack it.
    """
    added = _tracer_types() - pytreelib.DATA_REGISTRY
    for tracer in added:
        nnx.register_data_type(tracer)
    try:
        yield
    finally:
        # Outside `build`, a module may store a traced value without changing the set of its variables.
        pytreelib.DATA_REGISTRY.difference_update(added)


@cache
def _tracer_types() -> frozenset[type]:
    """Returns the types of tracers under a trace, and under `vmap` within a trace."""
    types = set[type]()

    def note(x: jax.Array) -> jax.Array:
        types.add(type(x))
        return x

    jax.eval_shape(lambda x: jax.vmap(note)(note(x)), jax.ShapeDtypeStruct((1,), "float32"))
    return frozenset(types)
