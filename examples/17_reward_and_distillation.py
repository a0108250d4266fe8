"""A reward model, and distillation: GPTs learn which digits are sorted up, and what a larger one makes of them.

Usage:
  python examples/17_reward_and_distillation.py [--steps 100]
"""

import argparse

import jax
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


def reward(model, up, down):  # one of the logits after the answer
    return losses.reward(model(up)[:, -1, 0], model(down)[:, -1, 0])


def sft(model, up, _):  # of all tokens
    return losses.sft(model(up[:, :-1]), up[:, 1:])


def distillation(model, up, _, teacher):  # from its four likeliest tokens
    return losses.distill(model(up), *jax.lax.top_k(teacher(up), 4))


@spanax.jit(mesh="fsdp=8", static_argnames="loss_fn")
def step(model, optimizer, *operands, loss_fn):
    (loss, metrics), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, *operands)
    optimizer.update(model, gradients)
    return {"loss": loss} | metrics


def train(loss_fn, size, *frozen):
    config = gpt.GPTConfig(vocab_size=16, seq_len=8, num_layers=2, num_heads=4, embed_dim=size)
    model = gpt.GPT(config, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    generator = np.random.default_rng(0)
    for _ in range(steps):
        asked = np.concatenate([generator.integers(0, 10, (128, 3)), np.full((128, 1), 10)], 1)
        pair = (np.concatenate([asked, np.sort(asked[:, :3] * order) * order], 1) for order in (1, -1))
        metrics = step(model, optimizer, *pair, *frozen, loss_fn=loss_fn)
    print(f"{loss_fn.__name__}, {steps} steps:", {name: f"{value:.3f}" for name, value in metrics.items()}, flush=True)
    return model


train(reward, 32)
teacher = train(sft, 64)
train(distillation, 32, teacher)
