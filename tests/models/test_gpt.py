"""GPT: the published sizes, causality, and one set of numbers for every way to run the blocks."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sampling import sampled
from spanax.models.gpt import GPT, SIZES, GPTConfig, loss

TINY = GPTConfig(vocab_size=64, seq_len=16, num_layers=2, num_heads=4, embed_dim=32)


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, (4, TINY.seq_len), dtype=np.int32)


@functools.partial(nnx.jit, static_argnums=(0, 1))
def build(config: GPTConfig, seed: int = 0) -> GPT:
    return GPT(config, nnx.Rngs(seed))


def count(config: GPTConfig) -> int:
    params = nnx.state(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))), nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt3-175b", 174_604_259_328),
    ],
)
def test_parameters_match_the_published_models(size, expected):
    assert count(SIZES[size]) == expected


def test_parameters_do_not_depend_on_scan():
    assert count(dataclasses.replace(SIZES["gpt2"], scan_layers=False)) == count(SIZES["gpt2"])


def test_initialization():
    params = nnx.state(build(dataclasses.replace(SIZES["nano"], num_layers=8), 0), nnx.Param)
    blocks = params["blocks"]
    assert np.std(params["embed"][...]) == pytest.approx(0.02, rel=0.02)
    assert np.std(blocks["attention"]["qkv"]["kernel"][...]) == pytest.approx(0.02, rel=0.02)
    for residual in (blocks["attention"]["out"], blocks["down"]):
        assert np.std(residual["kernel"][...]) == pytest.approx(0.02 / 4, rel=0.02)
    up = np.asarray(blocks["up"]["kernel"][...])
    assert not np.array_equal(up[0], up[1])  # every layer draws its own


def test_initial_loss_is_uniform():
    batch = {"inputs": tokens(0), "targets": tokens(1)}
    assert float(loss(build(TINY, 0), batch)) == pytest.approx(math.log(TINY.vocab_size), rel=0.01)


def test_future_tokens_do_not_change_earlier_logits():
    model, before = build(TINY, 0), tokens()
    after = before.copy()
    after[:, 9:] = (after[:, 9:] + 1) % TINY.vocab_size
    np.testing.assert_array_equal(model(before)[:, :9], model(after)[:, :9])
    assert not np.allclose(model(before)[:, 9:], model(after)[:, 9:])


@pytest.mark.parametrize("remat", sampled([False, True], [True]))
def test_scanned_equals_unrolled(remat):
    scanned = build(dataclasses.replace(TINY, remat=remat), 0)
    unrolled = build(dataclasses.replace(TINY, scan_layers=False, remat=remat), 1)
    stacked = nnx.to_pure_dict(nnx.state(scanned, nnx.Param))
    layers = {i: jax.tree.map(lambda leaf, i=i: leaf[i], stacked["blocks"]) for i in range(TINY.num_layers)}
    state = nnx.state(unrolled, nnx.Param)
    nnx.replace_by_pure_dict(state, stacked | {"blocks": layers})
    nnx.update(unrolled, state)

    batch = {"inputs": tokens(0), "targets": tokens(1)}
    value, grads = nnx.jit(nnx.value_and_grad(loss))(scanned, batch)
    value_unrolled, grads_unrolled = nnx.jit(nnx.value_and_grad(loss))(unrolled, batch)
    np.testing.assert_allclose(value, value_unrolled, rtol=1e-6)
    for i in range(TINY.num_layers):
        for a, b in zip(jax.tree.leaves(grads["blocks"]), jax.tree.leaves(grads_unrolled["blocks"][i]), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scan_layers", sampled([True, False], [True]))
def test_dropout_draws_new_numbers_each_step_except_in_evaluation(scan_layers):
    model = build(dataclasses.replace(TINY, dropout=0.5, scan_layers=scan_layers, remat=True), 0)
    forward = nnx.jit(lambda model, tokens_BT: model(tokens_BT))
    assert not np.allclose(forward(model, tokens()), forward(model, tokens()))
    model.eval()
    np.testing.assert_array_equal(forward(model, tokens()), forward(model, tokens()))


def test_bfloat16_parameters_compute_in_bfloat16():
    model = build(TINY, 0)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    assert model(tokens()).dtype == jnp.bfloat16
    assert loss(model, {"inputs": tokens(0), "targets": tokens(1)}).dtype == jnp.float32


@pytest.mark.parametrize("scan_layers", sampled([True, False], [True]))
def test_learns_one_batch(scan_layers):
    model = build(dataclasses.replace(TINY, scan_layers=scan_layers), 0)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        return value

    batch = {"inputs": tokens(0), "targets": np.roll(tokens(0), -1, axis=1)}
    losses = [float(step(model, optimizer, batch)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
