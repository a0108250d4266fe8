"""A matmul whose operands are quantized by Qwix, with straight-through gradients.

Gradients are those of the matmul of unquantized operands, as if rounding were the identity. Their own matmuls are
quantized, too, where the recipe says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.errors import NotInstalledError

Dims = tuple[int, ...]
Numbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]
"""The `dimension_numbers` of a matmul: contracted dims of both operands, then batch dims of both."""


@dataclass(frozen=True)
class Recipe:
    """How the operands of a matmul, and the gradient of its result, are quantized.

    Attributes:
      operand: the dtype of both operands in the forward pass, or Qwix's name of a format.
      gradient: the dtype of the gradient in both matmuls of the backward pass, whose other operand is that of the
        forward pass, as it was quantized; None: both matmuls have unquantized operands.
      tile: the number of elements along the last contracted dim that share a scale; 0: all that are contracted.
      calibration: Qwix's name of what is mapped to the largest number of the dtype.
    """

    operand: str
    gradient: str | None = None
    tile: int = 0
    calibration: str = "absmax"


RECIPES: Mapping[str, Recipe] = {
    "int8": Recipe("int8", "int8", calibration=f"absmax,{127.5 / 127}"),
    "fp8": Recipe("float8_e4m3fn", "float8_e5m2"),
    "nvfp4": Recipe("nvfp4", tile=16),
}
"""The recipes by name.

The largest magnitude (absmax) of what shares a scale is mapped to the largest number of the dtype, in every step. With
int8 and fp8, each row of the left operand and each column of the right has a scale. For int8, Qwix would map it to
127.5: the last bit of a sum would decide whether the lowest of them becomes -127 or -128, and layouts would differ.

Source: google/qwix 0.1.8, `QtRule`, its defaults, with the dtypes of AI-Hypercomputer/maxtext,
docs/explanations/quantization.md: `weight_qtype`, `act_qtype` and `bwd_qtype` int8; e4m3fn for weights and activations
and e5m2 for gradients. nvfp4: arXiv 2509.25149, section 2: 16 elements share a scale in e4m3, and an array one in
float32; here a row does, so that no example depends on another. Gradients are not quantized: its authors need
stochastic rounding and Hadamard transforms for them, and Qwix's `quantize` has neither.
"""

LARGEST_NVFP4 = 448.0 * 6.0
"""The largest number of nvfp4: the largest scale in e4m3 times the largest element in e2m1."""


def quantized_matmul(lhs: Any, rhs: Any, numbers: Numbers, recipe: Recipe) -> Any:
    """Returns the matmul of floating operands of one dtype, in that dtype, computed by a recipe.

    Raises:
      NotInstalledError: Qwix is not installed.

    Example:
      >>> lhs, rhs = jnp.linspace(-1, 1, 64).reshape(4, 16), jnp.linspace(-2, 1, 64).reshape(16, 4)
      >>> numbers = (((1,), (0,)), ((), ()))
      >>> differences = [abs(quantized_matmul(lhs, rhs, numbers, RECIPES[name]) - lhs @ rhs) for name in RECIPES]
      >>> [round(float(difference.max() / abs(lhs @ rhs).max()), 3) for difference in differences]
      [0.007, 0.015, 0.048]
    """
    return _matmul(lhs, rhs, numbers, recipe)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(lhs: Any, rhs: Any, numbers: Numbers, recipe: Recipe) -> Any:
    return _forward(lhs, rhs, numbers, recipe)[0]


def _forward(lhs: Any, rhs: Any, numbers: Numbers, recipe: Recipe) -> tuple[Any, tuple[Any, Any]]:
    (of_lhs, of_rhs), _ = numbers
    if recipe.tile:
        tiled = _in_tiles(lhs, of_lhs, recipe), _in_tiles(rhs, of_rhs, recipe)
        return _product(*tiled, numbers, lhs.dtype), (lhs, rhs)
    left, right = (_quantized(x, dims, recipe, recipe.operand) for x, dims in ((lhs, of_lhs), (rhs, of_rhs)))
    return _product(left, right, numbers, lhs.dtype), (left, right)


def _backward(numbers: Numbers, recipe: Recipe, residuals: tuple[Any, Any], gradient: Any) -> tuple[Any, Any]:
    lhs, rhs = residuals
    (of_lhs, of_rhs), (batch_lhs, batch_rhs) = numbers
    swapped = (of_rhs, of_lhs), (batch_rhs, batch_lhs)
    rows = tuple(range(len(batch_lhs), lhs.ndim - len(of_lhs)))
    columns = tuple(range(lhs.ndim - len(of_lhs), gradient.ndim))
    return (
        _gradient_of(gradient, columns, rhs, numbers, recipe),
        _gradient_of(gradient, rows, lhs, swapped, recipe),
    )


_matmul.defvjp(_forward, _backward)


def _gradient_of(gradient: Any, contracted: Dims, other: Any, numbers: Numbers, recipe: Recipe) -> Any:
    """Returns the gradient of an operand, the first of `numbers`.

    Args:
      gradient: that of the result.
      contracted: its dims that are those of the other operand.
      other: the other operand, as the forward pass stored it.
      numbers: those of the forward pass.
      recipe: how the gradient is quantized, if it is.
    """
    (summed, of_other), (batch, batch_other) = numbers
    kept = _others(other.ndim, (*of_other, *batch_other))
    in_result = tuple(range(len(batch)))
    backward = (contracted, kept), (in_result, batch_other)
    if recipe.gradient is None:
        result = jax.lax.dot_general(gradient, other, backward, preferred_element_type=gradient.dtype)
    else:
        # The scales of the other operand are along dims that are contracted now, and move to the gradient.
        num_free = gradient.ndim - len(contracted) - len(batch)
        is_last = contracted[-1:] == (gradient.ndim - 1,)
        scale = _aligned(other.scale, batch_other, kept, *((num_free, 0) if is_last else (0, num_free)))
        quantized = _quantized(gradient * scale, contracted, recipe, recipe.gradient)
        result = _product(quantized, replace(other, scale=None), backward, gradient.dtype)
    order = (*batch, *_others(result.ndim, (*summed, *batch)), *(summed[at] for at in np.argsort(of_other)))
    return result.transpose(np.argsort(order))


def _quantized(array: Any, contracted: Dims, recipe: Recipe, dtype: str) -> Any:
    """Returns the array as Qwix quantizes it, with a scale for all elements along the contracted dims."""
    channels = _others(array.ndim, contracted)
    return _qwix().quantize(array, dtype, channelwise_axes=channels, calibration_method=recipe.calibration)


def _in_tiles(array: Any, contracted: Dims, recipe: Recipe) -> Any:
    """Returns an array quantized in tiles, with the scales of tiles multiplied and those of rows left.

    An element times the scale of its tile has at most 6 significant bits: it is exact in 16-bit numbers.
    """
    qwix = _qwix()
    row = jnp.abs(array).max(contracted, keepdims=True).astype(jnp.float32) / LARGEST_NVFP4
    row = jnp.where(row > 0, row, 1.0)
    axes = {"channelwise_axes": _others(array.ndim, contracted[-1:]), "tiled_axes": {contracted[-1]: recipe.tile}}
    tiles = qwix.quantize(array.astype(jnp.float32) / row, recipe.operand, **axes)
    return qwix.QArray(qwix.dequantize(tiles).astype(array.dtype), row)


def _product(lhs: Any, rhs: Any, numbers: Numbers, dtype: Any) -> Any:
    """Returns the matmul of quantized operands in a dtype; an operand without a scale is as it is."""
    (of_lhs, of_rhs), (batch_lhs, batch_rhs) = numbers
    sums = jnp.int32 if lhs.qvalue.dtype == jnp.int8 else dtype
    result = jax.lax.dot_general(lhs.qvalue, rhs.qvalue, numbers, preferred_element_type=sums)
    rows = _others(lhs.ndim, (*of_lhs, *batch_lhs))
    columns = _others(rhs.ndim, (*of_rhs, *batch_rhs))
    result = result * _aligned(lhs.scale, batch_lhs, rows, 0, len(columns))
    if rhs.scale is not None:
        result = result * _aligned(rhs.scale, batch_rhs, columns, len(rows), 0)
    return result.astype(dtype)


def _aligned(scale: Any, batch: Dims, kept: Dims, before: int, after: int) -> Any:
    """Returns a scale with its batch dims, dims of size 1, its kept dims, and dims of size 1."""
    ordered = scale.transpose(*batch, *kept, *_others(scale.ndim, (*batch, *kept)))
    sizes = ordered.shape[: len(batch) + len(kept)]
    return ordered.reshape(*sizes[: len(batch)], *[1] * before, *sizes[len(batch) :], *[1] * after)


def _others(ndim: int, dims: Dims) -> Dims:
    return tuple(dim for dim in range(ndim) if dim not in dims)


def _qwix() -> Any:
    """Returns Qwix. Not its matmuls: they ask for the devices, of which a trace needs none."""
    try:
        import qwix
    except ImportError:
        raise NotInstalledError("quantization requires Qwix.", fix='pip install "spanax[quantize]"') from None
    return qwix
