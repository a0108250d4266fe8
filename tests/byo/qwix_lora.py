"""Fine-tuning by Qwix: low-rank additions to the projections of a language model, intercepted, not written down."""

import jax.numpy as jnp
import optax
import qwix
from flax import nnx

from byo import lora_gpt

VOCAB, LENGTH = lora_gpt.VOCAB, 16
wrt = nnx.LoRAParam
optimizer = optax.adamw(1e-2, eps=0.1)


def build(rngs: nnx.Rngs):
    provider = qwix.LoraProvider(module_path=r".*(attn/[qv]|fc1)", rank=4, alpha=8.0)
    ids = jnp.zeros((1, LENGTH), jnp.int32)
    return qwix.apply_lora_to_model(lora_gpt.GPT(rngs=rngs), provider, ids, rngs=rngs)


loss, batch = lora_gpt.loss, lora_gpt.batch
