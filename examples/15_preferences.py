"""Preferences (DPO): a GPT that sorts three digits up or down learns from pairs of answers to sort them up.

Supervised fine-tuning comes first. A copy of its result is the reference: frozen, and sharded as the model is.

Usage:
  python examples/15_preferences.py [--steps 40]
"""

import argparse

import numpy as np
import optax
from flax import nnx

import spanax
from spanax import losses
from spanax.models import gpt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
steps = parser.parse_args().steps
spanax.simulate(8)  # eight devices on any machine; leave it out where there are real ones

WEIGHTS = np.float32([0, 0, 0, 1, 1, 1])  # the answer alone counts; token 10 asks for it


def answered(digits, order):
    return np.concatenate([digits, np.full((len(digits), 1), 10), np.sort(digits * order) * order], 1)


def supervised(model, tokens):
    return losses.sft(model(tokens[:, :-1]), tokens[:, 1:], WEIGHTS)


def preference(model, reference, *pair):
    chosen, rejected = (losses.log_probs(model(tokens[:, :-1]), tokens[:, 1:], WEIGHTS) for tokens in pair)
    before = (losses.log_probs(reference(tokens[:, :-1]), tokens[:, 1:], WEIGHTS) for tokens in pair)
    return losses.dpo(chosen, rejected, *before, beta=0.5)


@spanax.jit(mesh="fsdp=8", microbatches=2, static_argnames="loss_fn")
def step(model, optimizer, *operands, loss_fn):
    (_, metrics), gradients = spanax.value_and_grad(loss_fn, has_aux=True)(model, *operands)
    optimizer.update(model, gradients)  # of the model alone: the reference has no gradient and no optimizer state
    return metrics


generator = np.random.default_rng(0)
model = gpt.GPT(gpt.GPTConfig(vocab_size=16, seq_len=8, num_layers=2, num_heads=4, embed_dim=64), nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
for _ in range(5 * steps):
    tokens = answered(generator.integers(0, 10, (128, 3)), generator.choice([1, -1], (128, 1)))
    step(model, optimizer, tokens, loss_fn=supervised)
reference = nnx.clone(model)
optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)
for _ in range(steps):
    digits = generator.integers(0, 10, (128, 3))
    metrics = step(model, optimizer, reference, answered(digits, 1), answered(digits, -1), loss_fn=preference)
print(f"after {steps} steps:", {name: f"{value:.3f}" for name, value in metrics.items()})
