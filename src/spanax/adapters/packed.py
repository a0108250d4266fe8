"""Frozen weights in 4 or 8 bits: a Variable whose value is unpacked wherever the model reads it."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from spanax.errors import UnknownNameError, nearest

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of NF4, in units of the largest of a group. Source: Dettmers et al., "QLoRA", 2023, appendix E."""

FORMATS = ("nf4", "int8")
"""The formats of packed weights."""

CODES_PER_WORD = 8
"""The codes of NF4 in a word of 32 bits: libtpu unpacks words in less memory than bytes."""

GROUP = 64
"""The number of elements with a common scale. Source: Dettmers et al., "QLoRA", 2023."""

MIN_GROUP = 8
"""Arrays without a group of this size are not packed: scales would outweigh what packing saves."""


PARTS = ("codes", "scale")
"""The last parts of the paths of the arrays of a packed Variable."""


def known_format(name: str) -> str:
    """Returns a format of packed weights; raises UnknownNameError if there is none with this name."""
    if name not in FORMATS:
        what = f"unknown format '{name}' of frozen weights."
        raise UnknownNameError(what, where="with adapters, matmuls are not quantized", fix=nearest(name, FORMATS))
    return name


@final
@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["format", "dim", "dtype"])
@dataclass(frozen=True)
class Packed:
    """An array in 4 or 8 bits, with a scale for each group of elements along one dim.

    Attributes:
      codes: int8, or words of int32 with the codes of neighbors along the packed dim.
      scale: the largest magnitude of each group.
      format: one of `FORMATS`.
      dim: the packed dim, counted from the end: dims of stacked layers may be added and removed.
      dtype: the name of the dtype of the unpacked array, and of the scales.

    Example:
      >>> values = jnp.linspace(-1, 1, 256).reshape(128, 2)
      >>> packed = Packed.of(values, "nf4", -2)
      >>> packed.codes.shape, packed.scale.shape, packed.shape
      ((16, 2), (2, 2), (128, 2))
      >>> bool(jnp.abs(packed.array() - values).max() < 0.16)
      True
    """

    codes: Any
    scale: Any
    format: str
    dim: int
    dtype: str

    @staticmethod
    def of(values: jax.Array, format: str, dim: int, dtype: Any = None) -> "Packed":
        """Returns the packed values, whose dtype is by default that of the array."""
        dtype = str(values.dtype if dtype is None else jnp.dtype(dtype))
        grouped = _split(values.astype(jnp.float32), dim, group_size(values.shape, dim))
        # Values are divided by the scale as it is stored.
        scale = jnp.abs(grouped).max(dim, keepdims=True).astype(dtype)
        units = grouped / jnp.where(scale == 0, 1, scale).astype(jnp.float32)
        scale = jnp.squeeze(scale, dim)
        if format == "int8":
            codes = jnp.clip(jnp.round(units * 127), -127, 127).astype(jnp.int8)
            return Packed(_merged(codes, dim), scale, format, dim, dtype)
        words = _split(_merged(_nf4(units), dim), dim, CODES_PER_WORD) << _shifts(dim)
        return Packed(jnp.sum(words, dim, dtype=jnp.int32), scale, format, dim, dtype)

    def array(self) -> jax.Array:
        """Returns the unpacked array."""
        if self.format == "int8":
            units = self.codes.astype(self.dtype) / 127
        else:
            # A sharded weight is gathered before it is repeated: what moves are words, and not values.
            position = self.codes.ndim + self.dim + 1
            words = jnp.repeat(jnp.expand_dims(self.codes, position), CODES_PER_WORD, axis=position)
            units = _nf4_values(_merged(words >> _shifts(self.dim), self.dim), self.dtype)
        size = units.shape[self.dim] // self.scale.shape[self.dim]
        return _merged(_split(units, self.dim, size) * jnp.expand_dims(self.scale, self.dim), self.dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unpacked array."""
        shape = list(self.codes.shape)
        shape[self.dim] *= CODES_PER_WORD if self.format == "nf4" else 1
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.array()[index]


nnx.register_data_type(Packed)


def unpacked(_: nnx.Variable[Any], value: Any) -> Any:
    """The hook of a packed Variable: returns the array that the model reads."""
    return value.array() if isinstance(value, Packed) else value


def pack(variable: nnx.Variable[Any], format: str, dim: int, dtype: Any = None) -> None:
    """Replaces the value of a Variable by a packed one, which is unpacked when it is read."""
    variable.set_raw_value(Packed.of(variable.get_value(), format, dim, dtype))
    variable.set_metadata("on_get_value", unpacked)


def is_packed(variable: nnx.Variable[Any]) -> bool:
    """Returns whether the value of a Variable is packed."""
    return isinstance(variable.get_raw_value(), Packed)


def group_size(shape: tuple[int, ...], dim: int) -> int:
    """Returns the number of elements along a dim that share a scale.

    Example:
      >>> group_size((4096, 11008), -2), group_size((96, 32), -2)
      (64, 32)
    """
    return math.gcd(shape[dim], GROUP)


def _shifts(dim: int) -> jax.Array:
    """Returns the first bit of each code in a word, along a dim."""
    return jnp.arange(0, 32, 4, dtype=jnp.int32).reshape(-1, *(1,) * (-dim - 1))


def _split(values: jax.Array, dim: int, size: int) -> jax.Array:
    """Splits a dim, counted from the end, into groups; the new dim follows it, at `dim`."""
    position = values.ndim + dim
    shape = values.shape
    return values.reshape(*shape[:position], shape[position] // size, size, *shape[position + 1 :])


def _merged(values: jax.Array, dim: int) -> jax.Array:
    """The inverse of `_split`."""
    position = values.ndim + dim
    shape = values.shape
    return values.reshape(*shape[: position - 1], shape[position - 1] * shape[position], *shape[position + 1 :])


def _nf4(units: jax.Array) -> jax.Array:
    """Returns the codes of the nearest values of NF4, as a sum of comparisons: no intermediate is larger."""
    codes = jnp.zeros(units.shape, jnp.int32)
    for lower, upper in zip(NF4, NF4[1:], strict=False):
        codes += (units > (lower + upper) / 2).astype(jnp.int32)
    return codes


def _nf4_values(codes: jax.Array, dtype: str) -> jax.Array:
    """Returns the values of codes by their bits: a gather from a table is slow on TPUs, and splits no dims."""
    # Products with numbers, as a choice between numbers would need arrays of them.
    first = (codes & 1).astype(jnp.float32)
    pairs = zip(NF4[::2], NF4[1::2], strict=True)
    values = [(low + first * (high - low)).astype(dtype) for low, high in pairs]
    for bit in range(1, 4):
        is_set = (codes >> bit) & 1 == 1
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]
