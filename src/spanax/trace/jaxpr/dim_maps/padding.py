"""How primitives compute with padded dims: parameters that hold sizes, and neutral elements of reductions."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spanax.trace.jaxpr.dim_maps.registry import Resized
from spanax.trace.jaxpr.dim_maps.relations import Equation, Shape


def shape_of(name: str) -> Resized:
    """Returns a function that sets a parameter to the shape of the result.

    Example:
      >>> shape_of("new_sizes")(None, [(2, 4), (8,)])
      {'new_sizes': (8,)}
    """
    return lambda equation, shapes: {name: tuple(shapes[-1])}


def limits_of(equation: Equation, shapes: Sequence[Shape]) -> Mapping[str, Any]:
    """Returns the ends of a slice; those of dims that are cut remain."""
    old = equation.shapes[0]
    cut = equation.shapes[-1]
    rows = zip(old, cut, shapes[0], equation.params["limit_indices"], strict=True)
    return {"limit_indices": tuple(new if size == part else end for size, part, new, end in rows)}


def slice_sizes_of(equation: Equation, shapes: Sequence[Shape]) -> Mapping[str, Any]:
    """Returns the sizes of the slices of a lookup; of dims that slices contain completely, the padded sizes."""
    rows = zip(equation.shapes[0], shapes[0], equation.params["slice_sizes"], strict=True)
    return {"slice_sizes": tuple(new if size == part else part for size, new, part in rows)}


def neutral_element(equation: Equation) -> Any:
    """Returns the result of a reduction of no elements.

    Example:
      >>> import jax
      >>> (eqn,) = jax.make_jaxpr(lambda x: jax.lax.reduce_max(x, (0,)))(jax.ShapeDtypeStruct((3,), "float32")).eqns
      >>> float(neutral_element(Equation(eqn)))
      -inf
    """
    dtype = np.dtype(equation.eqn.invars[0].aval.dtype)
    is_bool = dtype.kind == "b"
    name = equation.name.removeprefix("reduce_")
    if name in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if name in ("prod", "and"):
        return np.ones((), dtype) if is_bool or name == "prod" else np.invert(np.zeros((), dtype))
    if is_bool:
        return np.asarray(name == "min")
    if jnp.issubdtype(dtype, np.integer):
        return np.asarray(jnp.iinfo(dtype).min if name == "max" else jnp.iinfo(dtype).max, dtype)
    infinity = np.asarray(-np.inf if name == "max" else np.inf, dtype)
    if np.isinf(infinity.astype(np.float32)):
        return infinity
    return np.asarray(jnp.finfo(dtype).min if name == "max" else jnp.finfo(dtype).max, dtype)
