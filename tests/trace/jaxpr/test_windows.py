"""The halo of a shard under windows: shards with their halos compute what the whole computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spanax.trace.jaxpr.dim_maps.relations import Equation
from spanax.trace.jaxpr.dim_maps.windows import Window, windows

pytestmark = pytest.mark.usefixtures("devices")

WAYS = 4


def convolved(x: jax.Array, kernel: jax.Array, **options: object) -> jax.Array:
    return lax.conv_general_dilated(
        x[None, :, None], kernel[:, None, None], dimension_numbers=("NWC", "WIO", "NWC"), **options
    )[0, :, 0]  # type: ignore[arg-type]


def only(function: object, *arrays: jax.Array) -> Window:
    jaxpr = jax.make_jaxpr(function)(*arrays)  # type: ignore[arg-type]
    (window,) = itertools.chain.from_iterable(windows(Equation(eqn)) for eqn in jaxpr.eqns)
    return window


def extended(x: np.ndarray, before: int, after: int) -> list[np.ndarray]:
    size = len(x) // WAYS
    padded = np.pad(x, (before, after))
    return [padded[start : start + size + before + after] for start in range(0, len(x), size)]


@pytest.mark.parametrize(
    ("width", "stride", "padding", "dilation", "spread"),
    [
        (3, 1, (1, 1), 1, 1),
        (3, 2, (0, 1), 1, 1),
        (7, 2, (3, 3), 1, 1),
        (1, 2, (0, 0), 1, 1),
        (2, 2, (0, 0), 1, 1),
        (3, 1, (2, 2), 1, 2),
        (5, 1, (4, 0), 1, 1),
        (2, 1, (1, 1), 2, 1),
        (3, 1, (2, 1), 2, 1),
        (4, 1, (2, 2), 2, 1),
    ],
)
def test_shards_with_halos_compute_the_whole(
    width: int, stride: int, padding: tuple[int, int], dilation: int, spread: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=32).astype(np.float32)
    kernel = rng.normal(size=width).astype(np.float32)
    options = {"lhs_dilation": (dilation,), "rhs_dilation": (spread,)}
    forward = lambda x, w: convolved(x, w, window_strides=(stride,), padding=[padding], **options)  # noqa: E731
    whole = forward(x, kernel)
    window = only(forward, x, kernel)
    halo = window.halo(WAYS, False)
    assert halo is not None
    parts = [
        convolved(jnp.asarray(part), kernel, window_strides=(stride,), padding=[halo.padding], **options)
        for part in extended(x, halo.before, halo.after)
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)
    gradient = lambda x, dy: jax.linear_transpose(lambda w: forward(x, w), kernel)(dy)[0]  # noqa: E731
    summed = only(gradient, x, whole)
    halo = summed.halo(WAYS, True)
    assert halo is not None
    kernels = np.split(np.asarray(whole), WAYS)
    transposed = {"window_strides": (spread,), "lhs_dilation": (dilation,), "rhs_dilation": (stride,)}
    terms = [
        convolved(jnp.asarray(part), dy, padding=[halo.padding], **transposed)
        for part, dy in zip(extended(x, halo.before, halo.after), kernels, strict=True)
    ]
    np.testing.assert_allclose(np.sum(terms, 0), gradient(x, whole), atol=1e-4)


@pytest.mark.parametrize(
    ("size", "width", "padding"),
    [(30, 3, (1, 1)), (32, 3, (0, 0)), (32, 19, (9, 9)), (32, 17, (8, 8))],
)
def test_no_halo_where_a_neighbor_lacks_rows_or_the_rows_do_not_divide(
    size: int, width: int, padding: tuple[int, int]
) -> None:
    x, kernel = jnp.zeros(size), jnp.zeros(width)
    window = only(lambda x, w: convolved(x, w, window_strides=(1,), padding=[padding]), x, kernel)
    is_wide = width == 17  # 8 rows of each neighbor: exactly a shard
    assert (window.halo(WAYS, False) is not None) == is_wide
