"""Compares the bigram loss with the definition in its docstring."""

import math
from collections import Counter

import numpy as np
import pytest

from spanax.trace import workload
from spanax.trace.workload import bigram_loss


def written_out(train: list[int], validation: list[int], vocab_size: int, smoothing: float) -> float:
    """The loss as its docstring says it, one pair at a time."""
    pairs, before, each = Counter(zip(train, train[1:], strict=False)), Counter(train[:-1]), Counter(train)
    followers = Counter(first for first, _ in pairs)
    total = 0.0
    for a, b in zip(validation, validation[1:], strict=False):
        unigram = (each[b] + 1) / (len(train) + vocab_size)
        weight = smoothing * max(followers[a], 1)
        total -= math.log((pairs[a, b] + weight * unigram) / (before[a] + weight))
    return total / (len(validation) - 1)


@pytest.mark.parametrize("dense_pairs", [workload.DENSE_PAIRS, 0], ids=["dense", "sparse"])
@pytest.mark.parametrize("smoothing", [0.5, 2.0])
def test_the_bigram_loss_equals_the_explicit_sum(
    smoothing: float, dense_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "DENSE_PAIRS", dense_pairs)
    random = np.random.default_rng(0)
    train, validation = random.integers(0, 9, 300), random.integers(0, 12, 100)  # 9, 10 and 11 were never seen
    result = bigram_loss(train, validation, 12, smoothing)
    assert result == pytest.approx(written_out(train.tolist(), validation.tolist(), 12, smoothing), rel=1e-12)
    assert bigram_loss(train.astype(np.uint8), validation.astype(np.uint16), 12, smoothing) == result


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="token 9 is outside a vocabulary of 9"):
        bigram_loss(np.arange(10), np.arange(3), 9)


def test_the_model_is_fitted_on_the_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    train, validation = np.arange(64) % 7, np.arange(16) % 5
    monkeypatch.setattr(workload, "MAX_TRAIN_TOKENS", 20)
    assert bigram_loss(train, validation, 8) == bigram_loss(train[:20], validation, 8)
    monkeypatch.setattr(workload, "MAX_TRAIN_TOKENS", 64)
    assert bigram_loss(train, validation, 8) != bigram_loss(train[:20], validation, 8)
