"""Mixtral: the published sizes, routing against a loop over tokens, capacity or none, and what balance tells."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sampling import sampled
from spanax.models.moe import BALANCE_WEIGHT, Experts, Mixtral, MoEConfig, loss

TINY = MoEConfig(64, 16, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=16, mlp_dim=24, num_experts=4)


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, (4, TINY.seq_len), dtype=np.int32)


def hidden() -> np.ndarray:
    return np.random.default_rng(2).normal(size=(3, 16, 16)).astype(np.float32)


@functools.partial(nnx.jit, static_argnums=(0, 1))
def experts(config: MoEConfig, seed: int = 0) -> Experts:
    built = Experts(config, nnx.Rngs(seed))
    built.router.kernel[...] *= 50  # choices that rounding does not turn
    return built


def looped(model: Experts, x_BTD: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The same experts token by token, as the paper has it; and how many choices found no place."""
    router, gate, up, down = (np.asarray(p[...]) for p in (model.router.kernel, model.gate, model.up, model.down))
    y_BTD, dropped = np.zeros_like(x_BTD), 0
    for b, x_TD in enumerate(x_BTD):
        held = [0] * router.shape[1]
        for t, x_D in enumerate(x_TD):
            logits = x_D @ router
            chosen = np.argsort(-logits)[:2]
            weights = np.exp(logits[chosen] - logits[chosen].max())
            for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
                held[expert] += 1
                if held[expert] > capacity:
                    dropped += 1
                    continue
                a_F = x_D @ gate[expert]
                y_BTD[b, t] += weight * ((a_F / (1 + np.exp(-a_F)) * (x_D @ up[expert])) @ down[expert])
    return y_BTD, dropped


@pytest.mark.parametrize(
    ("factor", "capacity"), sampled([(2.0, 16), (1.25, 10), (0.5, 4), (None, 16)], [(0.5, 4), (None, 16)])
)
def test_experts_equal_a_loop_over_tokens(factor, capacity):
    model = experts(dataclasses.replace(TINY, capacity_factor=factor))
    y_BTD, result = model(hidden())
    expected, dropped = looped(model, hidden(), capacity)
    np.testing.assert_allclose(y_BTD, expected, atol=1e-5)
    assert float(result["dropped"]) == pytest.approx(dropped / (3 * 16 * 2))
    assert (dropped > 0) == (factor in (1.25, 0.5))


def test_without_capacity_no_token_is_dropped():
    """All tokens want one expert: of 8 places it gives 8 and drops the rest, without capacity it serves all."""
    crowded = {factor: experts(dataclasses.replace(TINY, capacity_factor=factor)) for factor in (1.0, None)}
    for model in crowded.values():
        model.router.kernel[...] = jnp.zeros((16, 4)).at[:, 0].set(100.0)
    dropped = {factor: float(model(np.abs(hidden()))[1]["dropped"]) for factor, model in crowded.items()}
    assert dropped[1.0] > 0.2 and dropped[None] == 0
    np.testing.assert_allclose(
        crowded[None](np.abs(hidden()))[0], looped(crowded[None], np.abs(hidden()), 16)[0], atol=1e-4
    )


@pytest.mark.parametrize("factor", [2.0, 0.5, None])
def test_future_tokens_do_not_change_earlier_ones(factor):
    """Not even by taking their place in an expert."""
    model = experts(dataclasses.replace(TINY, capacity_factor=factor))
    after = hidden()
    after[:, 9:] = after[:, :7]
    np.testing.assert_allclose(model(hidden())[0][:, :9], model(after)[0][:, :9], atol=1e-6)


def test_balance_is_one_where_all_are_as_likely_and_two_where_one_is_in_every_pair():
    model = experts(TINY)
    model.router.kernel[...] = jnp.zeros((16, 4))
    assert float(model(hidden())[1]["balance"]) == pytest.approx(1)
    model.router.kernel[...] = jnp.zeros((16, 4)).at[:, 0].set(100.0)
    assert float(model(np.abs(hidden()))[1]["balance"]) == pytest.approx(2, rel=1e-3)


def test_the_loss_is_cross_entropy_plus_the_weighted_balance():
    model = nnx.jit(lambda: Mixtral(TINY, nnx.Rngs(0)))()
    value, reported = loss(model, {"inputs": tokens(0), "targets": tokens(1)})
    assert float(value) == pytest.approx(float(reported["cross_entropy"] + BALANCE_WEIGHT * reported["balance"]))
    assert float(reported["cross_entropy"]) == pytest.approx(np.log(TINY.vocab_size), rel=0.02)
    assert 0.9 < float(reported["balance"]) < 2
