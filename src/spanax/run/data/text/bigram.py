"""Bigram: the loss that counting pairs of tokens reaches, which a trained model has to beat."""

import numpy as np

DENSE_PAIRS = 1 << 24
"""Up to so many possible pairs they are counted in a table (128 MiB of int64); above, only those that occur."""


def bigram_loss(
    train_tokens: np.ndarray, validation_tokens: np.ndarray, vocab_size: int, smoothing: float = 2.0
) -> float:
    """Cross-entropy in nats a token of a smoothed bigram model on the validation tokens.

    The chance of b after a is `(count(ab) + s * p(b)) / (count(a) + s)`: what was rarely seen backs off to p(b),
    the unigram chance with one added to every count. `s` is `smoothing` times the number of different tokens seen
    after a (Witten-Bell), so one value serves every vocabulary: a weak baseline would flatter the model.

    Args:
      train_tokens: ids the model counts, of shape [N].
      validation_tokens: ids it is scored on, of shape [M], M >= 2.
      vocab_size: how many ids there are.
      smoothing: how far to back off; 0 gives no chance at all to unseen pairs.

    Returns:
      The mean over the M - 1 pairs; log(vocab_size) for a model that knows nothing.

    Example:
      >>> text = np.frombuffer(b"abababababababab" * 64, np.uint8)
      >>> bigram_loss(text, text, vocab_size=256) < 0.05
      True
    """
    train = np.asarray(train_tokens).astype(np.int64)
    validation = np.asarray(validation_tokens).astype(np.int64)
    if len(validation) < 2:
        raise ValueError(f"a bigram needs two validation tokens, and there are {len(validation)}")
    highest = int(max(train.max(initial=0), validation.max()))
    if highest >= vocab_size:
        raise ValueError(f"token {highest} is outside a vocabulary of {vocab_size}")

    before, after = validation[:-1], validation[1:]
    num_each = np.bincount(train, minlength=vocab_size)
    num_before = np.bincount(train[:-1], minlength=vocab_size)
    chance = (num_each + 1) / (len(train) + vocab_size)
    num_pairs, num_followers = _count_pairs(train, before * vocab_size + after, vocab_size)
    weight = smoothing * np.maximum(num_followers[before], 1)
    chances = (num_pairs + weight * chance[after]) / (num_before[before] + weight)
    return float(-np.log(chances).mean())


def _count_pairs(tokens: np.ndarray, asked: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair asked for (first * vocab_size + second) occurs, and how many tokens follow each token."""
    seen = tokens[:-1] * vocab_size + tokens[1:]
    if vocab_size**2 <= DENSE_PAIRS:
        counts = np.bincount(seen, minlength=vocab_size**2)
        return counts[asked], np.count_nonzero(counts.reshape(vocab_size, vocab_size), axis=1)
    pairs, counts = np.unique(seen, return_counts=True)
    num_followers = np.bincount(pairs // vocab_size, minlength=vocab_size)
    if not len(pairs):
        return np.zeros(len(asked), np.int64), num_followers
    places = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
    return np.where(pairs[places] == asked, counts[places], 0), num_followers
