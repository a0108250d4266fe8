"""Weights in few bits: Qwix's codes, the values they stand for, and how a model reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from spanax.adapters.packed import Packed, group_size, pack

WEIGHT = jax.random.normal(jax.random.key(0), (3, 128, 4, 16))


@pytest.mark.parametrize("dim", [-3, -1])
def test_nf4_is_that_of_qwix(dim: int) -> None:
    size = group_size(WEIGHT.shape, dim)
    channels = [axis for axis in range(4) if axis != 4 + dim]
    expected = qwix.quantize(WEIGHT, "nf4", channelwise_axes=channels, tiled_axes={4 + dim: size})
    packed = Packed.of(WEIGHT, "nf4", dim)
    np.testing.assert_array_equal(packed.scale, expected.scale)
    # Qwix divides by scales in another order: values in the middle of two codes may get the other one.
    assert np.mean(np.asarray(packed.array()) != np.asarray(qwix.dequantize(expected))) < 1e-3
    assert packed.codes.dtype == jnp.int32 and packed.codes.size == WEIGHT.size // 8


def test_int8_rounds_to_the_nearest() -> None:
    packed = Packed.of(WEIGHT, "int8", -3)
    step = np.repeat(np.asarray(packed.scale), 64, 1) / 127
    assert np.all(np.abs(packed.array() - WEIGHT) <= step * 0.501)


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_values_that_are_exact(format: str) -> None:
    """Zeros, and the largest value of a group; also of one group of zeros."""
    values = jnp.zeros((128, 2)).at[3].set(-7.0).at[5, 0].set(7.0)
    np.testing.assert_array_equal(Packed.of(values, format, -2).array(), values)


def test_a_layer_reads_packed_weights() -> None:
    """Also in a stack: one layer of the parts is that part of the layers."""
    linear = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    kernel = linear.kernel[...]
    pack(linear.kernel, "int8", -2, jnp.bfloat16)
    expected = Packed.of(kernel, "int8", -2, jnp.bfloat16).array()
    assert linear.kernel[...].dtype == jnp.bfloat16 and linear.kernel.shape == (64, 8)
    np.testing.assert_array_equal(linear.kernel[3], expected[3])
    np.testing.assert_array_equal(jnp.eye(64) @ linear.kernel, expected.astype("float32"))
    layers = Packed.of(WEIGHT, "nf4", -3)
    layer = jax.tree.map(lambda part: part[1], layers)
    np.testing.assert_array_equal(layer.array(), layers.array()[1])
