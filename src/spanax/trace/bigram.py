"""The loss of a bigram model, the default baseline of a workload on text."""

import numpy as np

DENSE_PAIRS = 1 << 24
"""Up to this many possible pairs are counted in a dense table (128 MiB of int64); beyond, only pairs that occur."""

MAX_TRAIN_TOKENS = 1 << 25
"""The model is fitted on at most this many tokens; more would take longer than the evaluation itself."""


def bigram_loss(
    train_tokens: np.ndarray, validation_tokens: np.ndarray, vocab_size: int, smoothing: float = 2.0
) -> float:
    """Returns the cross-entropy, in nats per token, of a smoothed bigram model on the validation tokens.

    The probability of b after a is `(count(ab) + s * p(b)) / (count(a) + s)`, with p(b) the unigram probability after
    adding one to every count, and s equal to `smoothing` times the number of different tokens seen after a (Witten-Bell
    smoothing). One value of `smoothing` serves every vocabulary size.

    Args:
      train_tokens: token ids to fit the model on, of shape [N]; the first `MAX_TRAIN_TOKENS` are used.
      validation_tokens: token ids to evaluate the model on, of shape [M], M >= 2.
      vocab_size: the number of token ids.
      smoothing: the weight of the unigram probability; 0 gives unseen pairs a probability of zero.

    Returns:
      The mean over the M - 1 pairs; log(vocab_size) for a model without training tokens.

    Example:
      >>> text = np.frombuffer(b"abababababababab" * 64, np.uint8)
      >>> bigram_loss(text, text, vocab_size=256) < 0.05
      True
    """
    train = np.asarray(train_tokens[:MAX_TRAIN_TOKENS]).astype(np.int64)
    validation = np.asarray(validation_tokens).astype(np.int64)
    if len(validation) < 2:
        raise ValueError(f"a bigram needs two validation tokens, and there are {len(validation)}")
    highest = int(max(train.max(initial=0), validation.max()))
    if highest >= vocab_size:
        raise ValueError(f"token {highest} is outside a vocabulary of {vocab_size}")

    before = validation[:-1]
    after = validation[1:]
    num_tokens = np.bincount(train, minlength=vocab_size)
    num_before = np.bincount(train[:-1], minlength=vocab_size)
    unigram = (num_tokens + 1) / (len(train) + vocab_size)
    num_pairs, num_followers = _count_pairs(train, before * vocab_size + after, vocab_size)
    weight = smoothing * np.maximum(num_followers[before], 1)
    probabilities = (num_pairs + weight * unigram[after]) / (num_before[before] + weight)
    return float(-np.log(probabilities).mean())


def _count_pairs(tokens: np.ndarray, queries: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts the occurrences of each queried pair (first * vocab_size + second), and the followers of each token."""
    seen = tokens[:-1] * vocab_size + tokens[1:]
    if vocab_size**2 <= DENSE_PAIRS:
        counts = np.bincount(seen, minlength=vocab_size**2)
        return counts[queries], np.count_nonzero(counts.reshape(vocab_size, vocab_size), axis=1)
    pairs, counts = np.unique(seen, return_counts=True)
    num_followers = np.bincount(pairs // vocab_size, minlength=vocab_size)
    if not len(pairs):
        return np.zeros(len(queries), np.int64), num_followers
    positions = np.minimum(np.searchsorted(pairs, queries), len(pairs) - 1)
    return np.where(pairs[positions] == queries, counts[positions], 0), num_followers
