"""Draws tokens from logits."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from spanax.errors import RangeError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "min_p", "repetition_penalty"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; None for a rule that does not apply.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: the number of most likely tokens to draw from.
      top_p: draws from the fewest most likely tokens whose probabilities sum to this.
      min_p: draws from tokens that are at least this times as likely as the most likely one.
      repetition_penalty: divides the positive logits of tokens in the sequence, and multiplies negative ones.
        Source: Keskar et al., "CTRL", 2019 (arXiv 1909.05858), section 4.1.
    """

    temperature: Any = 1.0
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None

    def checked(self) -> "Sampling":
        """Returns the same rules.

        Raises:
          RangeError: a number is out of its range.
        """
        is_valid = {
            "temperature": ("at least 0", lambda number: 0 <= number < float("inf")),
            "top_k": ("a whole number of at least 1", lambda number: number == int(number) >= 1),
            "top_p": ("above 0, and at most 1", lambda number: 0 < number <= 1),
            "min_p": ("from 0 to 1", lambda number: 0 <= number <= 1),
            "repetition_penalty": ("above 0", lambda number: 0 < number < float("inf")),
        }
        for field in fields(self):
            value = getattr(self, field.name)
            what, test = is_valid[field.name]
            if value is None and field.name != "temperature":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not test(value):
                raise RangeError(f"`{field.name}` is {value!r}.", fix=what)
        return self


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling, seen: jax.Array | None) -> tuple[Any, Any]:
    """Returns a token for each row of logits, and its log-probability under the logits as they are.

    Args:
      logits: [rows, vocabulary].
      keys: a random key for each row.
      sampling: the rules.
      seen: whether each token is in the sequence, [rows, vocabulary]; for a repetition penalty.

    Example:
      >>> logits = jnp.log(jnp.array([[0.1, 0.7, 0.2]]))
      >>> token, log_probability = draw(logits, jax.random.split(jax.random.key(0), 1), Sampling(0.0), None)
      >>> token.tolist(), round(float(jnp.exp(log_probability[0])), 3)
      ([1], 0.7)
    """
    logits = logits.astype(jnp.float32)
    shaped = logits
    if sampling.repetition_penalty is not None:
        penalty = sampling.repetition_penalty
        shaped = jnp.where(seen, jnp.where(shaped > 0, shaped / penalty, shaped * penalty), shaped)
    greedy = shaped.argmax(-1)
    shaped = shaped / jnp.maximum(sampling.temperature, 1e-6)
    ranked = None
    if sampling.top_k is not None or sampling.top_p is not None:
        ranked = -jnp.sort(-shaped, axis=-1)
    if sampling.top_k is not None:
        last = jnp.minimum(jnp.asarray(sampling.top_k, jnp.int32), logits.shape[-1]) - 1
        floor = jnp.take_along_axis(ranked, jnp.broadcast_to(last, (*logits.shape[:-1], 1)), axis=-1)
        shaped = jnp.where(shaped < floor, -jnp.inf, shaped)
        ranked = jnp.where(ranked < floor, -jnp.inf, ranked)
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(ranked)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        floor = jnp.where(before < sampling.top_p, ranked, jnp.inf).min(-1, keepdims=True)
        shaped = jnp.where(shaped < floor, -jnp.inf, shaped)
    if sampling.min_p is not None:
        floor = shaped.max(-1, keepdims=True) + jnp.log(sampling.min_p)
        shaped = jnp.where(shaped < floor, -jnp.inf, shaped)
    drawn = jax.vmap(jax.random.categorical)(keys, shaped)
    tokens = jnp.where(jnp.asarray(sampling.temperature) == 0, greedy, drawn).astype(jnp.int32)
    log_probabilities = jax.nn.log_softmax(logits)
    return tokens, jnp.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]
