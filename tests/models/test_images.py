"""ViT and ResNet: the published sizes, what they see of an image; and the images, synthetic and real."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spanax.errors import SpanaxError
from spanax.models import images, resnet, vit
from spanax.trace.optimizers.named import sgd

TINY_VIT = vit.ViTConfig(16, 4, num_layers=2, num_heads=4, embed_dim=32, mlp_dim=64, num_classes=7)
TINY_RESNET = resnet.ResNetConfig(32, stage_sizes=(2,), width=8, num_classes=7)


@functools.partial(nnx.jit, static_argnums=(0, 1))
def build(model: type, config: object) -> nnx.Module:
    return model(config, nnx.Rngs(0))


def noise(size: int, batch_size: int = 4) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(batch_size, size, size, 3)).astype(np.float32)


def test_batch_statistics_change_only_in_training():
    model = build(resnet.ResNet, TINY_RESNET)
    before = np.asarray(model.stem.norm.mean[...])
    model(noise(32))
    moved = np.asarray(model.stem.norm.mean[...])
    model.eval()
    model(noise(32))
    assert not np.array_equal(before, moved) and np.array_equal(moved, model.stem.norm.mean[...])


def test_a_vit_is_initialized_as_in_the_authors_code():
    model = build(vit.ViT, vit.SIZES["nano"])
    block, uniform = model.blocks, lambda fan_in, fan_out: (2 / (fan_in + fan_out)) ** 0.5  # of a standard deviation
    for kernel, spread in (
        (block.attention.qkv.kernel, uniform(128, 128)),  # of queries, keys and values each
        (block.attention.out.kernel, uniform(128, 128)),
        (block.up.kernel, uniform(128, 512)),
        (block.up.bias, 1e-6),
        (model.positions, 0.02),
    ):
        assert np.std(kernel[...]) == pytest.approx(spread, rel=0.05)
    assert not np.any(model.head.kernel[...]) and not np.any(model.class_token[...])


def test_biases_and_norms_do_not_decay_under_sgd():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2), "scale": jnp.ones(2)}
    optimizer = sgd(0.1, 1)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), _, params)  # the first step warms up
    assert not np.any(updates["bias"]) and not np.any(updates["scale"]) and np.all(updates["kernel"] < 0)


@pytest.mark.parametrize(("model", "config"), [(vit.ViT, TINY_VIT), (resnet.ResNet, TINY_RESNET)])
def test_the_loss_starts_near_uniform_and_reports_accuracy(model, config):
    batch = {"images": noise(config.image_size, 14), "labels": np.arange(14, dtype=np.int32) % 7}
    value, reported = images.loss(build(model, config), batch)
    assert float(value) == pytest.approx(np.log(7), rel=0.5)
    assert 0 <= float(reported["accuracy"]) <= 1


def test_synthetic_images_are_the_same_at_every_reading_and_differ_from_each_other():
    source = images.SyntheticImages(32, 10, 100)
    held_out = images.SyntheticImages(32, 10, 100, first=1)
    assert len(source) == 100 and {int(source[i]["labels"]) for i in range(20)} == set(range(10))
    np.testing.assert_array_equal(source[3]["images"], images.SyntheticImages(32, 10, 100)[3]["images"])
    for other in (source[13], held_out[3], source[4]):
        assert not np.array_equal(source[3]["images"], other["images"])
    with pytest.raises(IndexError):
        source[100]


def test_digits_are_real_and_held_out_ones_differ():
    pytest.importorskip("sklearn", reason='the digits come with scikit-learn: pip install "spanax[examples]"')
    digits, held_out = images.Digits(image_size=16), images.Digits(image_size=16, held_out=True)
    assert (len(digits), len(held_out)) == (1437, 360)
    result = digits[0]["images"]
    assert result.shape == (16, 16, 3) and result.dtype == np.float32 and result.min() == -1 and result.max() <= 1
    np.testing.assert_array_equal(result[::2, ::2], result[1::2, 1::2])  # each pixel is a square
    np.testing.assert_array_equal(result[::2, ::2], images.Digits()[0]["images"])
    everything = {digits[i]["images"].tobytes() for i in range(len(digits))}
    assert not any(held_out[i]["images"].tobytes() in everything for i in range(len(held_out)))
    assert {int(held_out[i]["labels"]) for i in range(len(held_out))} == set(range(10))
    assert images.Digits(labelled=False)[0].keys() == {"images"}
    with pytest.raises(SpanaxError, match="image_size is 12; expected a multiple of 8"):
        images.Digits(image_size=12)
