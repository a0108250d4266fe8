"""Llama and Qwen: the published sizes, rotary positions, shared keys and values, and a trace as short at any depth."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spanax.models import llama
from spanax.models.llama import SIZES, Attention, Llama, LlamaConfig, RopeScaling, loss, rotate
from spanax.models.workloads import load

TINY = LlamaConfig(64, 16, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, mlp_dim=64)


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, (4, TINY.seq_len), dtype=np.int32)


@functools.partial(nnx.jit, static_argnums=(0, 1))
def build(config: LlamaConfig, seed: int = 0) -> Llama:
    return Llama(config, nnx.Rngs(seed))


@pytest.mark.parametrize(
    ("name", "expected"),
    # The total sizes that Hugging Face shows for meta-llama and Qwen.
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("qwen2-0.5b", 494_032_768),
        ("qwen2-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_parameters_match_the_published_models(name, expected):
    params = nnx.state(nnx.eval_shape(lambda: load(name).build(nnx.Rngs(0))), nnx.Param)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == expected


def test_405b_is_traced_as_one_block(monkeypatch):
    blocks, call = [], llama.Block.__call__
    monkeypatch.setattr(llama.Block, "__call__", lambda self, *args: (blocks.append(self), call(self, *args))[1])
    program = load("llama3-405b").trace(learning_rate=1e-4, num_steps=10)
    assert 0 < len(blocks) < 126 / 10
    assert program.step.axes.coverage == 1.0 and not program.step.axes.unknown
    assert {axis.name: axis.ways for axis in program.axes}["heads"] == 8


def test_initial_loss_is_uniform():
    batch = {"inputs": tokens(0), "targets": tokens(1)}
    assert float(loss(build(TINY), batch)) == pytest.approx(math.log(TINY.vocab_size), rel=0.02)


def test_future_tokens_do_not_change_earlier_logits():
    model, before = build(TINY), tokens()
    after = before.copy()
    after[:, 9:] = (after[:, 9:] + 1) % TINY.vocab_size
    np.testing.assert_allclose(model(before)[:, :9], model(after)[:, :9], atol=1e-6)
    assert not np.allclose(model(before)[:, 9:], model(after)[:, 9:], atol=1e-3)


def test_rotation_preserves_norms_and_makes_scores_relative():
    q_K, k_K = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    q_TK, k_TK = (np.asarray(rotate(jnp.tile(x_K, (1, 16, 1, 1)), 100.0))[0, :, 0] for x_K in (q_K, k_K))
    np.testing.assert_allclose(np.linalg.norm(q_TK, axis=-1), np.linalg.norm(q_K), rtol=1e-5)
    scores_TT = q_TK @ k_TK.T
    for distance in (0, 3, 7):  # the same everywhere, and another at another distance
        diagonal = np.diagonal(scores_TT, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp([scores_TT[0, 0], scores_TT[0, 3], scores_TT[0, 7]]) > 0.1
    # Position 1 turns the first pair by one radian, and the last of four by 100 ** (-3 / 4) of one.
    for pair, angle in ((0, 1.0), (3, 100.0**-0.75)):
        turned = q_K[pair] * math.cos(angle) - q_K[pair + 4] * math.sin(angle)
        assert q_TK[1, pair] == pytest.approx(turned, rel=1e-5)


def turned_at_one(theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """By what angle position 1 turns each pair of 128 channels."""
    x_BTHK = np.concatenate([np.ones((1, 2, 1, 64)), np.zeros((1, 2, 1, 64))], axis=-1).astype(np.float32)
    y_K = np.asarray(rotate(x_BTHK, theta, scaling))[0, 1, 0]
    return np.arctan2(y_K[64:], y_K[:64])


def test_rope_scaling_changes_only_low_frequencies():
    """The three cases of Meta's own function: wavelengths under 2,048 positions, over 8,192, and between."""
    speed_K, scaled_K = turned_at_one(500_000.0, None), turned_at_one(500_000.0, RopeScaling())
    wavelength_K = 2 * math.pi / speed_K
    smooth_K = (8192 / wavelength_K - 1) / (4 - 1)
    between_K = (1 - smooth_K) * speed_K / 8 + smooth_K * speed_K
    expected_K = np.where(wavelength_K < 2048, speed_K, np.where(wavelength_K > 8192, speed_K / 8, between_K))
    np.testing.assert_allclose(scaled_K, expected_K, rtol=1e-4)
    assert len({*np.digitize(wavelength_K, [2048, 8192])}) == 3  # each of the cases occurs


def test_queries_and_keys_are_normalized_per_head_before_rotation():
    plain, normed = (
        Attention(32, 4, 2, 100.0, nnx.initializers.normal(0.02), nnx.Rngs(0), head_dim=16, qk_norm=has)
        for has in (False, True)
    )
    assert normed.q.kernel.shape == (32, 4, 16) and normed.q_norm.scale.shape == (16,)
    call, x_BTD = nnx.jit(lambda model, x_BTD: model(x_BTD)), np.random.default_rng(0).normal(size=(2, 8, 32))
    for item in ("q", "k"):  # a kernel of any size gives the same, but for the epsilon
        getattr(normed, item).kernel[...] *= 50
    before = np.asarray(call(normed, x_BTD))
    for item in ("q", "k"):
        getattr(normed, item).kernel[...] *= 3
    np.testing.assert_allclose(call(normed, x_BTD), before, atol=1e-5)
    assert not np.allclose(call(plain, x_BTD), before, atol=1e-3)
    normed.q_norm.scale[...] *= 3
    assert not np.allclose(call(normed, x_BTD), before, atol=1e-4)


def test_biases_and_tied_embeddings_are_those_of_qwen2():
    model = build(dataclasses.replace(TINY, qkv_bias=True, tied_embeddings=True))
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert {path for path in paths if path.endswith("bias")} == {f"blocks.attention.{item}.bias" for item in "qkv"}
    assert not any(path.startswith("head") for path in paths)
    call = nnx.jit(lambda model: model(tokens() % 8))
    before = np.asarray(call(model))
    model.embed[...] = model.embed[...].at[50].multiply(2.0)  # a token that no input has: only its logit knows
    np.testing.assert_allclose(
        call(model) / before, np.where(np.arange(64) == 50, 2, 1) * np.ones((4, 16, 1)), rtol=1e-4
    )


def test_grouped_queries_equal_repeated_keys_and_values():
    grouped = Attention(32, 4, 2, 100.0, nnx.initializers.normal(0.02), nnx.Rngs(0))
    full = Attention(32, 4, 4, 100.0, nnx.initializers.normal(0.02), nnx.Rngs(1))
    full.q.kernel[...], full.out.kernel[...] = grouped.q.kernel[...], grouped.out.kernel[...]
    for name in ("k", "v"):
        getattr(full, name).kernel[...] = jnp.repeat(getattr(grouped, name).kernel[...], 2, axis=1)
    x_BTD = np.random.default_rng(0).normal(size=(2, 8, 32)).astype(np.float32)
    np.testing.assert_allclose(grouped(x_BTD), full(x_BTD), atol=1e-6)


@pytest.mark.slow
def test_remat_changes_no_number():
    batch = {"inputs": tokens(0), "targets": tokens(1)}
    gradient = nnx.jit(nnx.value_and_grad(loss))
    value, grads = gradient(build(TINY), batch)
    again, grads_again = gradient(build(dataclasses.replace(TINY, remat=True)), batch)
    np.testing.assert_allclose(value, again, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), nnx.state(grads), nnx.state(grads_again))


def test_half_precision_is_preserved_except_in_the_loss():
    model = build(TINY)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    assert jax.eval_shape(lambda: model(tokens())).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: loss(model, {"inputs": tokens(0), "targets": tokens(1)})).dtype == jnp.float32


def test_every_layer_draws_different_numbers():
    up = np.asarray(build(TINY).blocks.mlp.up.kernel[...])
    assert up.shape == (3, 32, 64) and not np.array_equal(up[0], up[1])
    wide = build(SIZES["nano"])
    assert np.std(wide.blocks.mlp.up.kernel[...]) == pytest.approx(0.02, rel=0.02)
    for residual in (wide.blocks.mlp.down, wide.blocks.attention.out):
        assert np.std(residual.kernel[...]) == pytest.approx(0.02 / 8**0.5, rel=0.02)
