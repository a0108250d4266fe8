"""Losses of fine-tuning: functions of arrays that return `(loss, metrics)`.

They take logits, log-probabilities or rewards, and no model: any model in any layout computes these. Each reads its
logits token by token, so that `loss_chunks` applies, and combines examples by sums alone, so that `microbatches` are
exact. `weights` are 0 where a target does not count.
"""

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

Loss = tuple[Array, dict[str, Array]]
"""A loss and its metrics, as a loss of `spanax.trace` or of `spanax.value_and_grad(..., has_aux=True)` returns them."""


def token_log_probs(logits: Array, targets: Array) -> Array:
    """Returns the log-probability of each target, at least in float32.

    Args:
      logits: [..., vocab].
      targets: [...], integers.

    Example:
      >>> token_log_probs(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), int)).shape
      (2, 3)
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return -optax.softmax_cross_entropy_with_integer_labels(wide, targets)


def log_probs(logits: Array, targets: Array, weights: ArrayLike, *, mean: bool = False) -> Array:
    """Returns the log-probability of each sequence, or with `mean` that of its tokens on average.

    Args:
      logits: [batch, seq, vocab].
      targets: [batch, seq].
      weights: [batch, seq] or [seq]; of a sequence without weights, the result is 0.
      mean: divides by the sum of the weights.

    Example:
      >>> log_probs(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), int), jnp.ones((2, 3))).shape
      (2,)
    """
    tokens = token_log_probs(logits, targets)
    counted = jnp.broadcast_to(weights, tokens.shape)
    total = (tokens * counted).sum(-1)
    return total / jnp.maximum(counted.sum(-1), jnp.finfo(tokens.dtype).tiny) if mean else total


def sft(logits: Array, targets: Array, weights: ArrayLike | None = None) -> Loss:
    """Returns the mean negative log-likelihood of the targets that count; NaN if none does.

    Args:
      logits: [batch, seq, vocab].
      targets: [batch, seq].
      weights: [batch, seq] or [seq]; by default, every target counts.

    Example:
      >>> loss, metrics = sft(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), int))
      >>> round(float(loss), 3), float(metrics["tokens"])
      (1.386, 6.0)
    """
    tokens = token_log_probs(logits, targets)
    return _mean(-tokens, weights)


def dpo(
    chosen: Array,
    rejected: Array,
    reference_chosen: Array,
    reference_rejected: Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Loss:
    """Returns the loss of direct preference optimization.

    The metrics are means over the batch: the rewards of both completions, and how often that of the chosen one is
    higher. Source: Rafailov et al., arXiv 2305.18290, equation 7; `label_smoothing` is the probability that a label is
    wrong, Mitchell, "A note on DPO with noisy preferences" (2023).

    Args:
      chosen: [batch], the log-probability of each chosen completion (`log_probs`).
      rejected: [batch], that of the rejected one.
      reference_chosen: [batch], that of the chosen one in the model from which training began.
      reference_rejected: [batch], that of the rejected one in it.
      beta: how far the model may move from the reference: less with more.
      label_smoothing: from 0 to below 0.5.

    Example:
      >>> loss, metrics = dpo(*jnp.log(jnp.array([[0.4], [0.1], [0.2], [0.2]])), beta=1.0)
      >>> round(float(loss), 3), float(metrics["accuracy"])
      (0.223, 1.0)
    """
    chosen_rewards = beta * (chosen - reference_chosen)
    rejected_rewards = beta * (rejected - reference_rejected)
    loss, metrics = reward(chosen_rewards, rejected_rewards)
    if label_smoothing:
        flipped, _ = reward(rejected_rewards, chosen_rewards)
        loss = (1 - label_smoothing) * loss + label_smoothing * flipped
    return loss, metrics


def reward(chosen: Array, rejected: Array, *, margin: ArrayLike = 0.0) -> Loss:
    """Returns the loss of a reward model: that of Bradley and Terry, the negative log-probability of the preferences.

    The metrics are means over the batch: both rewards, and how often that of the chosen completion is higher.
    Source: Ouyang et al., arXiv 2203.02155, equation 1; `margin`: Touvron et al., arXiv 2307.09288, section 3.2.2.

    Args:
      chosen: [batch], the reward of each chosen completion.
      rejected: [batch], that of the rejected one.
      margin: by how much the rewards should differ; a number or [batch].

    Example:
      >>> loss, _ = reward(jnp.array([2.0]), jnp.array([1.0]))
      >>> round(float(loss), 3)
      0.313
    """
    losses = -jax.nn.log_sigmoid(chosen - rejected - margin)
    return losses.mean(), {"chosen_reward": chosen.mean(), "rejected_reward": rejected.mean(),
                           "accuracy": _share(chosen > rejected)}  # fmt: skip


def orpo(chosen: Array, rejected: Array, *, beta: float = 0.1) -> Loss:
    """Returns the loss of odds ratio preference optimization, which needs no reference.

    The metrics are means over the batch: the negative log-likelihood of chosen completions, the log of the odds ratio,
    and how often it is above 0. Source: Hong et al., arXiv 2403.07691, equations 4 to 7; `beta` is their lambda.

    Args:
      chosen: [batch], the mean log-probability of the tokens of each chosen completion (`log_probs(..., mean=True)`).
      rejected: [batch], that of the rejected one.
      beta: the weight of the odds ratio beside the likelihood.

    Example:
      >>> loss, metrics = orpo(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25])), beta=1.0)
      >>> round(float(loss), 3), round(float(metrics["log_odds_ratio"]), 3)
      (0.981, 1.099)
    """
    ratio = _log_odds(chosen) - _log_odds(rejected)
    nll = -chosen.mean()
    loss = nll - beta * jax.nn.log_sigmoid(ratio).mean()
    return loss, {"nll": nll, "log_odds_ratio": ratio.mean(), "accuracy": _share(ratio > 0)}


def kto(
    completions: Array,
    reference: Array,
    desirable: Array,
    divergence: ArrayLike,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Loss:
    """Returns the loss of Kahneman-Tversky optimization, for completions that are each desirable or not.

    The metrics are means over the batch: the reward, and the divergence with which it is compared.
    Source: Ethayarajh et al., arXiv 2402.01306, section 4.1.

    Args:
      completions: [batch], the log-probability of each completion (`log_probs`).
      reference: [batch], that in the model from which training began.
      desirable: [batch], 1 or True for a desirable completion, 0 or False for any other.
      divergence: a number: `kto_divergence` of the whole batch.
      beta: how far the model may move from the reference: less with more.
      desirable_weight: that of desirable completions.
      undesirable_weight: that of the others.

    Example:
      >>> loss, metrics = kto(*jnp.log(jnp.array([[0.4], [0.2]])), jnp.array([1]), divergence=0.0, beta=1.0)
      >>> round(float(loss), 3), round(float(metrics["reward"]), 3)
      (0.333, 0.693)
    """
    divergence = jax.lax.stop_gradient(jnp.asarray(divergence))
    rewards = beta * (completions - reference)
    gains = rewards - beta * divergence
    is_desirable = desirable.astype(bool)
    losses = 1 - jax.nn.sigmoid(jnp.where(is_desirable, gains, -gains))
    weights = jnp.where(is_desirable, desirable_weight, undesirable_weight)
    return (losses * weights).mean(), {"reward": rewards.mean(), "divergence": divergence}


def kto_divergence(mismatched: Array, reference_mismatched: Array) -> Array:
    """Returns the estimated divergence of the model from its reference, at least 0.

    Each example of `kto` is compared with it. Within a loss, it combines the whole batch, and `microbatches` raise an
    error. Computed before, outside of the function that is differentiated, it lets the loss run in microbatches.
    Source: Ethayarajh et al., arXiv 2402.01306, section 4.1.

    Args:
      mismatched: [batch], the log-probability of the completion of another prompt, such as that of the next example.
      reference_mismatched: [batch], that in the model from which training began.

    Example:
      >>> round(float(kto_divergence(*jnp.log(jnp.array([[0.4], [0.2]])))), 3)
      0.693
    """
    return jax.lax.stop_gradient(jnp.maximum((mismatched - reference_mismatched).mean(), 0.0))


def distill(
    logits: Array,
    teacher_logits: Array,
    teacher_tokens: Array,
    weights: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
) -> Loss:
    """Returns the divergence from the teacher's distribution over its likeliest tokens, times the squared temperature.

    The teacher's probabilities are those among its k tokens, the student's those in the whole vocabulary. With all
    tokens of the vocabulary, the loss is the divergence of both distributions.
    Source: Hinton et al., arXiv 1503.02531, section 2.

    Args:
      logits: [batch, seq, vocab], of the student.
      teacher_logits: [batch, seq, k], the largest of the teacher, stored or computed: `jax.lax.top_k(logits, k)`.
      teacher_tokens: [batch, seq, k], their tokens.
      weights: [batch, seq] or [seq]; by default, every token counts.
      temperature: divides the logits of both.

    Example:
      >>> logits = jnp.arange(12.0).reshape(1, 3, 4)
      >>> loss, metrics = distill(logits, *jax.lax.top_k(logits, 4))
      >>> abs(float(loss)) < 1e-6, float(metrics["tokens"])
      (True, 3.0)
    """
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    teacher = jax.nn.log_softmax(teacher_logits.astype(wide) / temperature)
    scaled = logits.astype(wide) / temperature
    normalizers = jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    student = jnp.take_along_axis(scaled, teacher_tokens, axis=-1) - normalizers
    divergences = (jnp.exp(teacher) * (teacher - student)).sum(-1)
    return _mean(temperature**2 * divergences, weights)


def _mean(values: Array, weights: ArrayLike | None) -> Loss:
    """Returns the weighted mean of the values of tokens; the number of tokens is its metric."""
    if weights is None:
        return values.mean(), {"tokens": jnp.asarray(values.size, values.dtype)}
    counted = jnp.broadcast_to(weights, values.shape)
    return (values * counted).sum() / counted.sum(), {"tokens": counted.sum()}


def _share(condition: Array) -> Array:
    return condition.astype(jnp.float32).mean()


def _log_odds(log_probability: Array) -> Array:
    """Returns the logarithm of p / (1 - p)."""
    return log_probability - jax.nn.log1mexp(-log_probability)
