"""ORPO and KTO: a GPT learns from pairs to sort three digits up, and then from answers that are each good or bad.

Usage:
  python examples/16_more_preferences.py [--steps 100]
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spanax
from spanax import losses
from spanax.models import gpt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps
spanax.simulate(8)  # eight devices on any machine; leave it out where there are real ones


def log_p(model, tokens, **options):  # of the answer alone, for which token 10 asks
    return losses.log_probs(model(tokens[:, :-1]), tokens[:, 1:], np.float32([0, 0, 0, 1, 1, 1]), **options)


def orpo(model, up, down):
    return losses.orpo(log_p(model, up, mean=True), log_p(model, down, mean=True))


def kto(model, up, down, reference):  # single answers: the first half of them is desirable
    tokens = jnp.concatenate([up, down])
    of_others = jnp.concatenate([tokens[:, :4], jnp.roll(tokens[:, 4:], 1, 0)], 1)
    divergence = losses.kto_divergence(log_p(model, of_others), log_p(reference, of_others))
    return losses.kto(log_p(model, tokens), log_p(reference, tokens), jnp.arange(len(tokens)) < len(up), divergence)


@spanax.jit(mesh="fsdp=8", static_argnames="loss_fn")
def step(model, optimizer, *operands, loss_fn):
    (loss, metrics), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, *operands)
    optimizer.update(model, gradients)
    return {"loss": loss} | metrics


def train(loss_fn, model, *frozen, learning_rate):
    optimizer = nnx.Optimizer(model, optax.adam(learning_rate), wrt=nnx.Param)
    generator = np.random.default_rng(0)
    for _ in range(steps):
        asked = np.concatenate([generator.integers(0, 10, (128, 3)), np.full((128, 1), 10)], 1)
        pair = (np.concatenate([asked, np.sort(asked[:, :3] * order) * order], 1) for order in (1, -1))
        metrics = step(model, optimizer, *pair, *frozen, loss_fn=loss_fn)
    print(f"{loss_fn.__name__}, {steps} steps:", {name: f"{value:.3f}" for name, value in metrics.items()}, flush=True)


model = gpt.GPT(gpt.GPTConfig(vocab_size=16, seq_len=8, num_layers=2, num_heads=4, embed_dim=64), nnx.Rngs(0))
train(orpo, model, learning_rate=2e-3)
train(kto, model, nnx.clone(model), learning_rate=1e-4)
