"""Reinforcement learning (REINFORCE with a baseline): a GPT learns to add two digits from rewards of its own samples.

Sampling and update share the sharded arrays, without copies. The log-probabilities of a sample are those of the update.

Usage:
  python examples/14_reinforce.py [--steps 200]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spanax
from spanax.models import gpt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps

spanax.simulate(8)  # eight devices on any machine; leave it out where there are real ones

PROMPTS, ADD = 256, 10  # a prompt is two digits and token 10, which asks for their sum
model = gpt.GPT(gpt.GPTConfig(vocab_size=11, seq_len=8, num_layers=2, num_heads=4, embed_dim=64), nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)


@spanax.jit(mesh="data=4,model=2")
def update(model, optimizer, tokens, before, advantages):
    def loss_fn(model):
        log_probabilities = jax.nn.log_softmax(model(tokens[:, :-1])[:, -1])
        after = jnp.take_along_axis(log_probabilities, tokens[:, -1:], axis=-1)
        entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1).mean()
        return -(after * advantages).mean() - 0.1 * entropy, after  # some entropy keeps it from settling too early

    (_, after), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return abs(after - before).max()


generator = np.random.default_rng(0)
baseline = 0.0
for step in range(1, steps + 1):
    digits = generator.integers(0, 5, (PROMPTS, 2))
    prompts = np.concatenate([digits, np.full((PROMPTS, 1), ADD)], 1)
    samples = spanax.generate(model, prompts, 1, seed=step, like=update if step > 1 else None)
    new = np.array([sample.tokens for sample in samples])
    rewards = new == digits.sum(1, keepdims=True)
    advantages = (rewards - baseline).astype("float32")  # the mean gradient is the same, and its variance smaller
    baseline = 0.9 * baseline + 0.1 * rewards.mean()
    before = np.array([sample.log_probabilities for sample in samples])
    difference = update(model, optimizer, np.concatenate([prompts, new], 1), before, advantages)
    if step % 25 == 0 or step == steps:
        print(f"step {step}: reward {rewards.mean():.3f}, log-probabilities differ by {difference:.1e}", flush=True)
