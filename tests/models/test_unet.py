"""The U-Net of diffusion: the published size, what it knows of the time, its loss, and images out of noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spanax.models.unet import SIZES, UNet, UNetConfig, adam, embed_time, loss, sample, signal_share

TINY = UNetConfig(8, width=8, multipliers=(1, 2), blocks_per_level=1, attention_size=4, num_groups=4, dropout=0)


@pytest.fixture(scope="module")
def tiny() -> UNet:
    return nnx.jit(lambda: UNet(TINY, nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def published() -> UNet:
    return nnx.eval_shape(lambda: UNet(SIZES["cifar10"], nnx.Rngs(0)))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_levels_are_those_of_the_paper(published):
    """Sizes from 32 x 32 to 4 x 4, two blocks each and three on the way up, attention at 16 x 16 and in the middle."""
    down, up = published.down, published.up
    has = [[block.attention is not None for block in level.blocks] for level in (*down, *up)]
    without, on_the_way_up = [False] * 2, [False] * 3
    assert has == [without, [True] * 2, without, without, on_the_way_up, on_the_way_up, [True] * 3, on_the_way_up]
    assert [level.blocks[0].residual.conv2.kernel.shape[-1] for level in down] == [128, 256, 256, 256]
    assert [level.resize is None for level in (*down, *up)] == [False] * 3 + [True] + [False] * 3 + [True]


def test_the_time_embedding_has_the_published_frequencies():
    actual = np.asarray(embed_time(jnp.arange(3), 8))
    np.testing.assert_allclose(
        actual[1], [*np.sin(waves := 10_000.0 ** (-np.arange(4) / 3)), *np.cos(waves)], rtol=1e-5
    )
    np.testing.assert_array_equal(actual[0], [0] * 4 + [1] * 4)


def test_the_initial_unet_loss_is_one_with_new_noise_each_step(tiny):
    batch, item = {"images": noise(64, 8, 8, 3)}, nnx.jit(loss)
    model = nnx.clone(tiny)
    results = [float(item(model, batch)) for _ in range(2)]
    assert results == pytest.approx([1, 1], rel=0.05) and results[0] != results[1]


@pytest.mark.slow
def test_sampling_with_the_exact_noise_returns_the_images():
    """Of images that are noise of spread 0.5 themselves, what is noise in a sum is known in closed form."""
    share = signal_share(TINY)

    class Perfect:
        config = TINY

        def __call__(self, x_BYXC, time_B):
            retained = share[time_B][:, None, None, None]
            return x_BYXC * jnp.sqrt(1 - retained) / (0.25 * retained + 1 - retained)

    result = jax.jit(lambda key: sample(Perfect(), key, 64))(jax.random.key(0))
    assert result.shape == (64, 8, 8, 3)
    assert float(result.std()) == pytest.approx(0.5, rel=0.03) and float(result.mean()) == pytest.approx(0, abs=0.02)


def test_adam_warms_up_and_then_keeps_its_rate():
    params = {"w": jnp.zeros(1)}
    optimizer = adam(0.1, 40)
    state, sizes = optimizer.init(params), []
    for _ in range(4):
        updates, state = optimizer.update({"w": jnp.ones(1)}, state, params)
        sizes.append(-float(updates["w"][0]))
    assert sizes == pytest.approx([0, 0.05, 0.1, 0.1], rel=1e-3)
