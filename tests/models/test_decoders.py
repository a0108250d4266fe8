"""GPT, Llama and Mixtral: causality, initial values, precision, rotary positions, and shared keys and values."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sampling import sampled
from spanax.models import gpt, llama, moe
from spanax.models.llama import Attention, LlamaConfig, RopeScaling, rotate
from spanax.models.workloads import load

GPT = gpt.GPTConfig(64, seq_len=16, num_layers=3, num_heads=4, embed_dim=32)
LLAMA = LlamaConfig(64, 16, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, mlp_dim=64)
GEMMA = dataclasses.replace(
    LLAMA,
    num_kv_heads=1,
    head_dim=16,
    activation="gelu",
    norm_offset=True,
    scaled_embeddings=True,
    tied_embeddings=True,
)
MOE = moe.MoEConfig(64, 16, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, mlp_dim=24, num_experts=4)
DECODERS: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (gpt.GPT, GPT, gpt.loss),
    "llama": (llama.Llama, LLAMA, llama.loss),
    "gemma": (llama.Llama, GEMMA, llama.loss),
    "moe": (moe.Mixtral, MOE, moe.loss),
}
every_decoder = pytest.mark.parametrize(("model", "config", "loss"), DECODERS.values(), ids=list(DECODERS))


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (4, 16), dtype=np.int32)


LENGTHS = (5, 7, 3)
"""The documents of a packed row, with one position of padding."""


def documents() -> dict[str, np.ndarray]:
    """A batch of packed rows."""
    numbers = np.repeat(np.array([1, 2, 3, 0]), [*LENGTHS, 1])
    positions = np.concatenate([np.arange(length) for length in (*LENGTHS, 1)])
    weights = np.random.default_rng(2).integers(0, 2, (4, 16)) * (numbers > 0)
    batch = {"segments": np.tile(numbers, (4, 1)), "positions": np.tile(positions, (4, 1))}
    integers = {name: array.astype(np.int32) for name, array in batch.items()}
    return {"inputs": tokens(0), "targets": tokens(1), "weights": weights.astype(np.float32), **integers}


BATCH = {"inputs": tokens(0), "targets": tokens(1)}


@functools.partial(nnx.jit, static_argnums=(0, 1, 2))
def build(model: Any, config: Any, seed: int = 0) -> Any:
    return model(config, nnx.Rngs(seed))


def first(result: Any) -> Any:
    """The logits or the loss, without metrics."""
    return result[0] if isinstance(result, tuple) else result


def test_positions_that_are_given_replace_those_along_the_row(devices: Any) -> None:
    """Packed rows restart them; attention, which is relative, would not show it."""
    x = np.random.default_rng(0).normal(size=(4, 16, 2, 8)).astype(np.float32)
    turned = np.asarray(rotate(x, 1e4, None, documents()["positions"]))
    for end, length in zip(np.cumsum(LENGTHS), LENGTHS, strict=True):
        own = slice(end - length, end)
        np.testing.assert_allclose(turned[:, own], rotate(x[:, own], 1e4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sampled(DECODERS, ["gpt", "llama"]))
def test_packed_documents_are_those_run_alone(name: str, devices: Any) -> None:
    """With slots for every token, since those of an expert are shared by the documents of a row."""
    make, config, loss = DECODERS[name]
    model = build(make, dataclasses.replace(config, capacity_factor=None) if name == "moe" else config)
    logits = nnx.jit(lambda model, *batch: jax.tree.leaves(model(*batch))[0])
    batch = documents()
    packed = np.asarray(logits(model, batch["inputs"], batch["segments"], batch["positions"]))
    total = 0.0
    for end, length in zip(np.cumsum(LENGTHS), LENGTHS, strict=True):
        own = slice(end - length, end)
        alone = np.asarray(logits(model, batch["inputs"][:, own]))
        np.testing.assert_allclose(packed[:, own], alone, rtol=0, atol=1e-5)
        nll = optax.softmax_cross_entropy_with_integer_labels(alone, batch["targets"][:, own])
        total += float((nll * batch["weights"][:, own]).sum())
    value = nnx.jit(loss)(model, batch)
    value = value[1]["cross_entropy"] if name == "moe" else value
    assert float(value) == pytest.approx(total / batch["weights"].sum(), rel=1e-5)


@every_decoder
def test_future_tokens_do_not_change_earlier_logits(model, config, loss):
    call, after = nnx.jit(lambda model, tokens: first(model(tokens))), tokens()
    after[:, 9:] = (after[:, 9:] + 1) % 64
    built = build(model, config)
    np.testing.assert_allclose(call(built, tokens())[:, :9], call(built, after)[:, :9], atol=1e-6)
    assert not np.allclose(call(built, tokens())[:, 9:], call(built, after)[:, 9:], atol=1e-3)


@every_decoder
def test_the_initial_loss_is_near_uniform_and_remat_changes_no_number(model, config, loss):
    gradient = nnx.jit(nnx.value_and_grad(lambda model, batch: first(loss(model, batch))))
    value, grads = gradient(build(model, config), BATCH)
    assert float(value) == pytest.approx(math.log(64), rel=0.05)
    again, grads_again = gradient(build(model, dataclasses.replace(config, remat=True)), BATCH)
    np.testing.assert_allclose(value, again, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), nnx.state(grads), nnx.state(grads_again))


@every_decoder
def test_half_precision_is_preserved_except_in_the_loss(model, config, loss):
    built = build(model, config)
    nnx.update(built, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(built, nnx.Param)))
    assert first(jax.eval_shape(lambda: built(tokens()))).dtype == jnp.bfloat16
    assert first(jax.eval_shape(lambda: loss(built, BATCH))).dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "up", "residuals", "spread"),
    [
        ("gpt-nano", "up.kernel", ("attention.out.kernel", "down.kernel"), 8),
        ("llama-nano", "mlp.up.kernel", ("attention.out.kernel", "mlp.down.kernel"), 8),
        ("moe-nano", "experts.up", ("attention.out.kernel", "experts.down"), 4),
    ],
)
def test_every_layer_draws_different_numbers_of_the_published_spread(name, up, residuals, spread):
    params = nnx.state(nnx.jit(lambda: load(name).build(nnx.Rngs(0)))(), nnx.Param)
    flat = {".".join(map(str, path)): np.asarray(value[...]) for path, value in nnx.to_flat_state(params)}
    layers = flat[f"blocks.{up}"]
    assert not np.array_equal(layers[0], layers[1])
    assert np.std(layers) == pytest.approx(0.02, rel=0.02) and np.std(flat["embed"]) == pytest.approx(0.02, rel=0.02)
    for residual in residuals:
        assert np.std(flat[f"blocks.{residual}"]) == pytest.approx(0.02 / spread**0.5, rel=0.02)


@pytest.mark.parametrize("remat", sampled([False, True], [True]))
def test_a_scanned_gpt_equals_an_unrolled_one(remat):
    scanned = build(gpt.GPT, dataclasses.replace(GPT, remat=remat))
    unrolled = build(gpt.GPT, dataclasses.replace(GPT, scan_layers=False, remat=remat), 1)
    stacked = nnx.to_pure_dict(nnx.state(scanned, nnx.Param))
    layers = {i: jax.tree.map(lambda leaf, i=i: leaf[i], stacked["blocks"]) for i in range(GPT.num_layers)}
    state = nnx.state(unrolled, nnx.Param)
    nnx.replace_by_pure_dict(state, stacked | {"blocks": layers})
    nnx.update(unrolled, state)
    value, grads = nnx.jit(nnx.value_and_grad(gpt.loss))(scanned, BATCH)
    value_unrolled, grads_unrolled = nnx.jit(nnx.value_and_grad(gpt.loss))(unrolled, BATCH)
    np.testing.assert_allclose(value, value_unrolled, rtol=1e-6)
    for i in range(GPT.num_layers):
        for a, b in zip(jax.tree.leaves(grads["blocks"]), jax.tree.leaves(grads_unrolled["blocks"][i]), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scan_layers", sampled([True, False], [True]))
def test_dropout_draws_new_numbers_each_step_except_in_evaluation(scan_layers):
    model = build(gpt.GPT, dataclasses.replace(GPT, dropout=0.5, scan_layers=scan_layers, remat=True))
    forward = nnx.jit(lambda model, tokens_BT: model(tokens_BT))
    assert not np.allclose(forward(model, tokens()), forward(model, tokens()))
    model.eval()
    np.testing.assert_array_equal(forward(model, tokens()), forward(model, tokens()))


def test_405b_is_traced_as_one_block(monkeypatch):
    blocks, call = [], llama.Block.__call__
    monkeypatch.setattr(llama.Block, "__call__", lambda self, *args: (blocks.append(self), call(self, *args))[1])
    program = load("llama3-405b").trace(learning_rate=1e-4, num_steps=10)
    assert 0 < len(blocks) < 126 / 10
    assert program.step.axes.coverage == 1.0 and not program.step.axes.unknown
    assert {axis.name: axis.ways for axis in program.axes}["heads"] == 8


def test_rotation_preserves_norms_and_makes_scores_relative():
    q_K, k_K = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    q_TK, k_TK = (np.asarray(rotate(jnp.tile(x_K, (1, 16, 1, 1)), 100.0))[0, :, 0] for x_K in (q_K, k_K))
    np.testing.assert_allclose(np.linalg.norm(q_TK, axis=-1), np.linalg.norm(q_K), rtol=1e-5)
    scores_TT = q_TK @ k_TK.T
    for distance in (0, 3, 7):  # the same everywhere, and another at another distance
        diagonal = np.diagonal(scores_TT, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp([scores_TT[0, 0], scores_TT[0, 3], scores_TT[0, 7]]) > 0.1


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


def test_grouped_queries_equal_repeated_keys_and_values():
    grouped = Attention(LLAMA, nnx.Rngs(0))
    full = Attention(dataclasses.replace(LLAMA, num_kv_heads=4), nnx.Rngs(1))
    full.q.kernel[...], full.out.kernel[...] = grouped.q.kernel[...], grouped.out.kernel[...]
    for name in ("k", "v"):
        getattr(full, name).kernel[...] = jnp.repeat(getattr(grouped, name).kernel[...], 2, axis=1)
    x_BTD = np.random.default_rng(0).normal(size=(2, 8, 32)).astype(np.float32)
    np.testing.assert_allclose(grouped(x_BTD), full(x_BTD), atol=1e-6)
