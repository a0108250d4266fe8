"""Log-probabilities of continuations, by the forward pass of whole sequences."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spanax.decoding.decoder import BUCKET, called, check_tokens
from spanax.decoding.derive.forward import evaluating, forward_of, logits_of
from spanax.decoding.derive.proof import tolerance
from spanax.errors import ArgumentError, CausalityError, DecodeError, RangeError
from spanax.jit.jit import jit
from spanax.jit.sharded_function import ShardedFunction

BATCH_TOKENS = 1 << 12
"""About so many tokens of a batch are on one device, which stores their logits."""


@dataclass(frozen=True)
class Likelihood:
    """The log-probability of a continuation.

    Attributes:
      log_probability: the sum over its tokens.
      is_greedy: whether each of its tokens is the most likely one after those before.
      num_tokens: the number of its tokens.
      num_cut: the number of tokens of the context that the model did not read, for want of positions.
    """

    log_probability: float
    is_greedy: bool
    num_tokens: int
    num_cut: int


def log_likelihoods(
    model: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    length: int,
    like: ShardedFunction | None = None,
    names: Sequence[str] = (),
) -> list[Likelihood]:
    """Returns the likelihood of each continuation after its context.

    Sequences are padded on the right to a power of two, and one program computes those of a length. A context is cut
    from the left if the model has too few positions.

    Args:
      model: as in `spanax.decode`. It is evaluated in evaluation mode.
      pairs: the token ids of contexts and of their continuations, each at least one.
      length: the number of positions of the model.
      like: a function of `spanax.jit` that was called or prepared, whose mesh and layout are used. By default, the
        parameters remain where they are.
      names: what errors call each pair.

    Raises:
      SpanaxError: a pair has no token or too many, or the model is not causal.

    Example:
      >>> from spanax.models import gpt
      >>> model = gpt.GPT(gpt.GPTConfig(64, 16, num_layers=1, num_heads=2, embed_dim=16), nnx.Rngs(0))
      >>> first, second = log_likelihoods(model, [([3, 1], [4, 1]), ([9] * 20, [5])], length=16)
      >>> first.log_probability < 0, first.num_tokens, first.num_cut, second.num_cut
      (True, 2, 0, 4)
    """
    if not isinstance(model, nnx.Module):
        raise ArgumentError.of("model", model, "an nnx.Module")
    for index, (context, continuation) in enumerate(pairs):
        name = names[index] if names else f"pair {index}"
        if not context or not continuation:
            what = "context" if not context else "continuation"
            raise RangeError(f"{name}: the {what} has no tokens.", fix="a text with at least one token")
        if len(continuation) > length:
            what = f"{name}: the continuation has {len(continuation)} tokens; the model has {length} positions."
            raise RangeError(what, fix="a shorter continuation")
    sizes = [min(len(context) + len(continuation) - 1, length) for context, continuation in pairs]
    buckets = [_bucket(size, length) for size in sizes]
    model = evaluating(nnx.clone(model))
    results: dict[int, Likelihood] = {}
    compiled: Callable[..., Any] = nnx.jit(_scores) if like is None else jit(_scores, like=like)
    for bucket in sorted(set(buckets), reverse=True):
        chosen = [index for index, each in enumerate(buckets) if each == bucket]
        count = batch_rows(len(chosen), BATCH_TOKENS // bucket, like)
        if not results:
            _check(model, compiled, [ids for pair in pairs for ids in pair], (count, bucket))
        for begin in range(0, len(chosen), count):
            part = chosen[begin : begin + count]
            likelihoods = _batch(model, compiled, [pairs[index] for index in part], (count, bucket))
            results.update(zip(part, likelihoods, strict=True))
    return [results[index] for index in range(len(pairs))]


def batch_rows(number: int, most: int, like: ShardedFunction | None) -> int:
    """Returns the number of sequences of a batch: a multiple of the devices, at most `most` for each if it is not 0."""
    ways = 1 if like is None else like.plan.mesh.size
    return ways * min(max(most, 1), -(-number // ways))


def _bucket(size: int, length: int) -> int:
    return min(max(BUCKET, 1 << (size - 1).bit_length()), length)


def _scores(model: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
    """Returns the log-probability of each target, and whether it is the most likely token, [sequences, positions]."""
    logits = logits_of(model(tokens), tokens.shape).astype(jnp.float32)
    of_targets = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return of_targets - jax.nn.logsumexp(logits, -1), logits.argmax(-1) == targets


def _batch(
    model: Any,
    compiled: Callable[..., Any],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    shape: tuple[int, int],
) -> Iterator[Likelihood]:
    """Yields the likelihoods of at most as many pairs as the batch has rows."""
    tokens = np.zeros(shape, np.int32)
    targets = np.zeros(shape, np.int32)
    rows = [[*context, *continuation][-shape[1] - 1 :] for context, continuation in pairs]
    for index, row in enumerate(rows):
        tokens[index, : len(row) - 1] = row[:-1]
        targets[index, : len(row) - 1] = row[1:]
    log_probabilities, is_most_likely = map(np.asarray, compiled(model, tokens, targets))
    for index, (row, (context, continuation)) in enumerate(zip(rows, pairs, strict=True)):
        scored = slice(len(row) - 1 - len(continuation), len(row) - 1)
        total = float(log_probabilities[index, scored].sum(dtype=np.float64))
        num_cut = len(context) + len(continuation) - len(row)
        yield Likelihood(total, bool(is_most_likely[index, scored].all()), len(continuation), num_cut)


def _check(model: Any, compiled: Callable[..., Any], texts: Sequence[Sequence[int]], shape: tuple[int, int]) -> None:
    """Checks token ids, and on random tokens that logits depend on no later tokens; warns if they do on other rows.

    Raises:
      SpanaxError: a token has no logit, or the model is not causal.
    """
    count, length = shape
    forward = forward_of(called, model, [jax.ShapeDtypeStruct((1, length), "int32")], ["tokens"], [True])
    for ids in texts:
        check_tokens("pairs", ids, forward.vocabulary)
    generator = np.random.default_rng(0)
    tokens, targets, others = generator.integers(0, forward.vocabulary, (3, *shape)).astype(np.int32)
    is_first = np.arange(length) < (np.arange(count)[:, None] + 1) * length // (count + 1)
    expected = np.asarray(compiled(model, tokens, targets)[0])
    if np.isnan(expected).any():
        raise DecodeError("the forward pass returns NaN for random tokens.", fix="parameters that are finite")
    most = tolerance(forward) * np.abs(expected[np.isfinite(expected)]).max(initial=1e-30)
    alone = [np.repeat(array[:1], count, 0) for array in (tokens, targets)]
    difference = np.abs(np.asarray(compiled(model, *alone)[0])[0] - expected[0])
    if not difference.max(initial=0, where=np.isfinite(expected[0])) <= most:
        warnings.warn("the log-probabilities of this model depend on the other sequences of a batch.", stacklevel=3)
        return
    difference = np.abs(np.asarray(compiled(model, np.where(is_first, tokens, others), targets)[0]) - expected)
    if not difference.max(initial=0, where=is_first & np.isfinite(expected)) <= most:
        raise CausalityError(
            "this model is not causal: the log-probabilities of tokens depend on later ones.",
            fix="a causal mask; the error of spanax.generate names the line",
        )
