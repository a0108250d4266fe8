"""Reinforcement learning (GRPO): a GPT learns to sort three digits from rewards of its own samples.

Sampling and update use the same sharded arrays. The log-probabilities of a sample are those of the update.

Usage:
  python examples/13_reinforcement.py [--steps 150]
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
parser.add_argument("--steps", type=int, default=150)
steps = parser.parse_args().steps

spanax.simulate(8)  # eight devices on any machine; leave it out where there are real ones

PROMPTS, GROUP, DIGITS, SORT = 16, 16, 3, 10  # token 10 asks for the sorted digits
model = gpt.GPT(gpt.GPTConfig(vocab_size=11, seq_len=8, num_layers=2, num_heads=4, embed_dim=64), nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@spanax.jit(mesh="fsdp=8")
def update(model, optimizer, tokens, before, advantages):
    def loss_fn(model):
        logits = model(tokens[:, :-1])[:, DIGITS:]
        after = jax.nn.log_softmax(logits)
        after = jnp.take_along_axis(after, tokens[:, DIGITS + 1 :, None], axis=-1)[..., 0]
        ratio = jnp.exp(after - before)  # 1 in the first update of a sample
        clipped = jnp.clip(ratio, 0.8, 1.2)
        return -jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean(), after

    (_, after), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return abs(after - before).max()


generator = np.random.default_rng(0)
for step in range(1, steps + 1):
    digits = generator.integers(0, 5, (PROMPTS, DIGITS))
    prompts = np.concatenate([digits, np.full((PROMPTS, 1), SORT)], 1)
    samples = spanax.generate(model, prompts, DIGITS, seed=step, num_samples=GROUP, like=update if step > 1 else None)
    new = np.array([sample.tokens for sample in samples])
    rewards = (new == np.repeat(np.sort(digits), GROUP, 0)).mean(1).reshape(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    tokens = np.concatenate([np.repeat(prompts, GROUP, 0), new], 1)
    before = np.array([sample.log_probabilities for sample in samples])
    difference = update(model, optimizer, tokens, before, advantages.reshape(-1))
    if step % 25 == 0 or step == steps:
        print(f"step {step}: reward {rewards.mean():.3f}, log-probabilities differ by {difference:.1e}", flush=True)
