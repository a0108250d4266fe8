"""Losses of a small language model, by how they combine the tokens of a batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

SIZE, LENGTH, VOCAB, EMBED = 16, 6, 11, 8


class Model(nnx.Module):
    """Four layers in a scan between an embedding with dropout and logits; in float64 under `jax_enable_x64`."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, EMBED, param_dtype=float)
        self.embed = nnx.Embed(VOCAB, EMBED, param_dtype=float, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: linear(EMBED, rngs=rngs)))(rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = linear(VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)
        layer = lambda x, layer: (x + jnp.tanh(nnx.merge(graph, layer)(x)), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, self.dropout(self.embed(tokens)), state)
        return self.head(x)


def batch(step: int) -> dict[str, np.ndarray]:
    """Tokens with their targets, and masks, weights and rewards that differ from example to example."""
    random = np.random.default_rng(step)
    tokens = random.integers(0, VOCAB, (SIZE, LENGTH + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": (random.random((SIZE, LENGTH)) < np.linspace(0.1, 1, SIZE)[:, None]).astype(np.float32),
        "weights": random.random(SIZE).astype(np.float32),
        "rewards": random.normal(size=SIZE).astype(np.float32),
    }


def nll(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])


def masked(model: Any, batch: Any) -> jax.Array:
    return (nll(model, batch) * batch["mask"]).sum() / batch["mask"].sum()


def z_loss(model: Any, batch: Any) -> jax.Array:
    logits, mask = model(batch["tokens"]), batch["mask"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    z = jnp.square(jax.nn.logsumexp(logits, -1))
    return (losses * mask).sum() / mask.sum() + 1e-2 * z.mean()


def two_masks(model: Any, batch: Any) -> jax.Array:
    losses, mask = nll(model, batch), batch["mask"]
    return (losses * mask).sum() / mask.sum() + 0.3 * (losses * (1 - mask)).sum() / jnp.maximum((1 - mask).sum(), 1)


def accuracy(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits, mask = model(batch["tokens"]), batch["mask"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    hits = (logits.argmax(-1) == batch["targets"]) * mask
    metrics = {
        "accuracy": hits.sum() / mask.sum(),
        "tokens": mask.sum(),
        "largest": losses.max(),
        "each": losses.mean(1),
    }
    return (losses * mask).sum() / mask.sum(), metrics


def policy_gradient(model: Any, batch: Any) -> jax.Array:
    advantages = (batch["rewards"] - batch["rewards"].mean()) / (batch["rewards"].std() + 1e-6)
    logp = jax.nn.log_softmax(model(batch["tokens"])[:, -1])
    return -(logp[jnp.arange(logp.shape[0]), batch["targets"][:, -1]] * advantages).mean()


def clipped_ratio(model: Any, batch: Any) -> jax.Array:
    logp = -nll(model, batch).sum(1)
    ratio = jnp.exp(logp - jax.lax.stop_gradient(logp) * 0.99)
    return -jnp.minimum(ratio * batch["rewards"], jnp.clip(ratio, 0.8, 1.2) * batch["rewards"]).mean()


def in_chunks(model: Any, batch: Any) -> jax.Array:
    logits, targets = model(batch["tokens"]), batch["targets"]

    def chunk(total: jax.Array, rows: Any) -> tuple[jax.Array, None]:
        return total + optax.softmax_cross_entropy_with_integer_labels(*rows).sum(), None

    return jax.lax.scan(chunk, jnp.zeros(()), (logits.swapaxes(0, 1), targets.swapaxes(0, 1)))[0] / targets.size


def noisy(model: Any, batch: Any) -> jax.Array:
    keys = jax.random.split(jax.random.key(7), batch["tokens"].shape[0])
    noise = jax.vmap(lambda key: jax.random.normal(key, (LENGTH, VOCAB)))(keys)
    logits = model(batch["tokens"]) + 0.1 * noise
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def distilled(model: Any, batch: Any) -> jax.Array:
    teacher = jax.nn.softmax(jax.nn.one_hot(batch["targets"], VOCAB) * 3)
    return (optax.kl_divergence(jax.nn.log_softmax(model(batch["tokens"])), teacher) * batch["mask"]).sum() / batch[
        "mask"
    ].sum()


def flattened(model: Any, batch: Any) -> jax.Array:
    logits, mask = model(batch["tokens"]).reshape(-1, VOCAB), batch["mask"].reshape(-1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"].reshape(-1))
    return jnp.vdot(losses, mask) / jnp.maximum(mask.sum(), 1)


def guided(model: Any, batch: Any) -> jax.Array:
    both = model(jnp.concatenate([batch["tokens"], batch["targets"]]))
    first, second = jnp.split(both, 2)
    return (jnp.square(first - second).mean((1, 2)) * batch["weights"]).sum() / batch["weights"].sum()


def decayed(model: Any, batch: Any) -> jax.Array:
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    return masked(model, batch) + 1e-2 * sum(jnp.square(weight).sum() for weight in weights)


LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda model, batch: nll(model, batch).mean(),
    "masked": masked,
    "weighted": lambda m, b: (nll(m, b).mean(1) * b["weights"]).sum() / b["weights"].sum(),
    "per sequence": lambda m, b: ((nll(m, b) * b["mask"]).sum(1) / jnp.maximum(b["mask"].sum(1), 1)).mean(),
    "sum over examples": lambda m, b: nll(m, b).sum() / b["tokens"].shape[0],
    "z loss": z_loss,
    "two masks": two_masks,
    "metrics": accuracy,
    "policy gradient": policy_gradient,
    "clipped ratio": clipped_ratio,
    "in chunks": in_chunks,
    "noise": noisy,
    "distilled": distilled,
    "flattened": flattened,
    "two batches": guided,
    "weight decay": decayed,
}
"""Losses in which the weight of each token is known before the model is evaluated."""


def confident(model: Any, batch: Any) -> jax.Array:
    losses = nll(model, batch)
    mask = (jax.lax.stop_gradient(losses) > 2.0).astype(jnp.float32)
    return (losses * mask).sum() / jnp.maximum(mask.sum(), 1)


def self_normalized(model: Any, batch: Any) -> jax.Array:
    losses = nll(model, batch)
    weights = jax.nn.sigmoid(losses)
    return (losses * weights).sum() / weights.sum()


NONLINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "perplexity": lambda model, batch: jnp.exp(masked(model, batch)),
    "root": lambda m, b: jnp.sqrt(jnp.square(m(b["tokens"])).mean()),
    "confident": confident,
    "self normalized": self_normalized,
}
"""Losses in which the weight of a token depends on what the model makes of the others."""


def contrastive(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"]).mean(1)
    return -jnp.diag(jax.nn.log_softmax(logits @ logits.T)).mean()


def normalized(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"])
    logits = (logits - logits.mean((0, 1))) / jnp.sqrt(logits.var((0, 1)) + 1e-5)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def hardest(model: Any, batch: Any) -> jax.Array:
    return jax.lax.top_k(nll(model, batch).reshape(-1), 8)[0].mean()


MIXED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "contrastive": (contrastive, "contrastive"),
    "batch norm": (normalized, "normalized"),
    "hardest": (hardest, "hardest"),
    "largest": (lambda model, batch: nll(model, batch).max(), "largest"),
}
"""Losses that compare examples, and the function in which they do."""
