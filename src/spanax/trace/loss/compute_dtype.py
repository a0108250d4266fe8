"""Explains why a loss that runs in the dtypes of its model cannot be computed in another."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from spanax.errors import SpanaxError, VariantError, first_line
from spanax.frames import user_frames
from spanax.trace.variables import Leaf

MOST = 3
"""The largest number of variables that an error lists."""


def dtype_error(error: Exception, dtype: str, leaves: Sequence[Leaf]) -> SpanaxError:
    """Returns the error of a loss that can be traced in its own dtypes only.

    Floating parameters and the batch are cast to the compute dtype. Other state keeps its dtype: a running mean in
    bfloat16 would drift. So an operation raises that requires operands of equal dtypes, such as a convolution or the
    gradient of a `jax.custom_vjp`, where the model combines both; others, such as an FFT, have no bfloat16.

    Args:
      error: what tracing raised.
      dtype: the compute dtype.
      leaves: the state.
    """
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in user_frames(error)[-1:]]
    cast = [leaf for leaf in leaves if leaf.kind == "other" and jnp.issubdtype(leaf.dtype, jnp.floating)]
    uncast = [f"{leaf.path} {leaf.dtype}" for leaf in cast if leaf.dtype != dtype]
    if uncast:
        more = f" and {len(uncast) - MOST} more" if len(uncast) > MOST else ""
        lines.append(f"state that is not trained keeps its dtype: {', '.join(uncast[:MOST])}{more}")
    return VariantError(
        f"the loss cannot be computed in {dtype}: {type(error).__name__}: {first_line(error)}",
        where="; ".join(lines),
        fix="cast the operands of this operation in the model, or compute_dtype='float32' (--dtype float32)",
    )
