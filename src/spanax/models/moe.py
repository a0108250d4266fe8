"""Mixtral and Qwen3's mixture of experts in plain Flax NNX: Llama's attention, and routed experts in place of its MLP.

Shape suffixes: B batch, T positions, V vocab, D embed, F mlp, E experts, K experts of a token, C capacity (slots of an
expert for the tokens of one example).

Source: Jiang et al., "Mixtral of Experts", 2024 (arXiv 2401.04088), table 1; Yang et al., "Qwen3 Technical Report",
2025 (arXiv 2505.09388), section 2 and table 2, with what it leaves out from Qwen3-30B-A3B's config.json.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from spanax.models.gpt import INIT, cross_entropy, residual_init
from spanax.models.llama import NO_DOCUMENTS, Attention, Documents, Llama, LlamaConfig, make_norm

BALANCE_WEIGHT = 0.01
"""The weight of the load-balancing loss. Source: Fedus et al., 2021, section 2.2; Mixtral's paper does not state
its weight."""


@dataclasses.dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """The configuration of a mixture of experts; each token is routed to `experts_per_token` experts.

    An expert has `capacity_factor` times its share of an example's tokens as slots, and tokens beyond these are
    dropped; of `num_experts / experts_per_token` or more, none is. If `capacity_factor` is None no token is dropped
    either, as in the published models, and none is dispatched: every expert computes every token, with a gate of 0 for
    experts that were not chosen. Both cost `num_experts / experts_per_token` times what the chosen experts compute.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    capacity_factor: float | None = 1.25
    rope_theta: float = 1_000_000.0


SIZES = {
    "nano": MoEConfig(256, 64, num_layers=2, num_heads=8, num_kv_heads=4, embed_dim=128, mlp_dim=128),
    "8x7b": MoEConfig(32_000, 4096, num_layers=32, num_heads=32, num_kv_heads=8, embed_dim=4096, mlp_dim=14336),
    "qwen3-30b-a3b": MoEConfig(
        151_936, 4096, 48, 32, 4, embed_dim=2048, mlp_dim=768, num_experts=128, experts_per_token=8,
        head_dim=128, qk_norm=True, norm_epsilon=1e-6,
    ),
}  # fmt: skip
"""Both were trained without a limit on the tokens of an expert; `8x7b` on 32,768 tokens per example."""


class Experts(nnx.Module):
    """Gated MLPs, some of which a router selects per token; tokens are written into their experts' slots by index.

    Source: the gates of Jiang et al., 2024, section 2.1; capacity of Lepikhin et al., "GShard", 2020 (arXiv
    2006.16668), section 2.2, and its default of Fedus et al., "Switch Transformers", 2021 (arXiv 2101.03961), section
    2.2, as is the balance, equation 4, divided by the number of experts per token, so that 1 is a uniform load.
    """

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        E = config.num_experts
        D = config.embed_dim
        F = config.mlp_dim
        self.num_chosen = config.experts_per_token
        self.capacity_factor = config.capacity_factor
        self.router = nnx.Linear(D, E, use_bias=False, kernel_init=INIT, rngs=rngs)
        self.gate, self.up = (nnx.Param(INIT(rngs.params(), (E, D, F))) for _ in range(2))
        self.down = nnx.Param(residual_init(config.num_layers)(rngs.params(), (E, F, D)))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits_BTE = self.router(x_BTD).astype(jnp.float32)
        num_experts = logits_BTE.shape[-1]
        top_BTK, chosen_BTK = jax.lax.top_k(logits_BTE, self.num_chosen)
        gates_BTK = jax.nn.softmax(top_BTK).astype(x_BTD.dtype)
        chosen_BTKE = jax.nn.one_hot(chosen_BTK, num_experts, dtype=jnp.int32)

        if self.capacity_factor is None:
            y_BTD = self._of_all(x_BTD, gates_BTK, chosen_BTKE)
            dropped = jnp.zeros(())
        else:
            y_BTD, dropped = self._in_slots(x_BTD, gates_BTK, chosen_BTK, chosen_BTKE, self.capacity_factor)

        share_E = chosen_BTKE.sum(2).astype(jnp.float32).mean((0, 1)) / self.num_chosen
        balance = num_experts * jnp.sum(share_E * jax.nn.softmax(logits_BTE).mean((0, 1)))
        return y_BTD, {"balance": balance, "dropped": dropped}

    def _of_all(self, x_BTD: jax.Array, gates_BTK: jax.Array, chosen_BTKE: jax.Array) -> jax.Array:
        """Applies every expert to every token, weighted by its gate: no token is sorted, dispatched or dropped."""
        gates_BTE = (gates_BTK[..., None] * chosen_BTKE.astype(x_BTD.dtype)).sum(2)
        gate_BTEF, up_BTEF = (jnp.einsum("BTD,EDF->BTEF", x_BTD, w[...]) for w in (self.gate, self.up))
        h_BTEF = jax.nn.silu(gate_BTEF) * up_BTEF * gates_BTE[..., None]
        return jnp.einsum("BTEF,EFD->BTD", h_BTEF, self.down[...])

    def _in_slots(
        self,
        x_BTD: jax.Array,
        gates_BTK: jax.Array,
        chosen_BTK: jax.Array,
        chosen_BTKE: jax.Array,
        capacity_factor: float,
    ) -> tuple[jax.Array, jax.Array]:
        """Applies each expert to the tokens in its slots; also returns the share of routed tokens that are dropped.

        Tokens are written into slots and read back by index. Each slot has at most one token, so that neither the
        writes nor the gradients of the reads collide.
        """
        num_tokens, _, num_experts = chosen_BTKE.shape[1:]
        capacity = min(math.ceil(capacity_factor * self.num_chosen * num_tokens / num_experts), num_tokens)
        # Slots are assigned in order of position, so that the model stays causal.
        place_BTE = jnp.cumsum(chosen_BTKE.sum(2), axis=1) - 1
        place_BTK = (place_BTE[:, :, None] * chosen_BTKE).sum(-1)

        def write(x_TD: jax.Array, chosen_TK: jax.Array, place_TK: jax.Array) -> jax.Array:
            x_TKD = jnp.broadcast_to(x_TD[:, None], (*chosen_TK.shape, x_TD.shape[-1]))
            slots_ECD = jnp.zeros((num_experts, capacity, x_TD.shape[-1]), x_TD.dtype)
            return slots_ECD.at[chosen_TK, place_TK].add(x_TKD, mode="drop", unique_indices=True)

        def read(y_ECD: jax.Array, chosen_TK: jax.Array, place_TK: jax.Array) -> jax.Array:
            return y_ECD.at[chosen_TK, place_TK].get(mode="fill", fill_value=0, unique_indices=True)

        x_BECD = jax.vmap(write)(x_BTD, chosen_BTK, place_BTK)
        gate_BECF, up_BECF = (jnp.einsum("BECD,EDF->BECF", x_BECD, w[...]) for w in (self.gate, self.up))
        y_BECD = jnp.einsum("BECF,EFD->BECD", jax.nn.silu(gate_BECF) * up_BECF, self.down[...])
        y_BTKD = jax.vmap(read)(y_BECD, chosen_BTK, place_BTK)
        dropped = jnp.mean(place_BTK >= capacity)
        return (gates_BTK[..., None] * y_BTKD).sum(2), dropped


class Block(nnx.Module):
    """A pre-norm transformer block: attention, then experts; the carry sums the experts' metrics over the layers."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, config.embed_dim, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = make_norm(config, config.embed_dim, rngs)
        self.experts = Experts(config, rngs)

    def __call__(
        self, carry: tuple[jax.Array, dict[str, jax.Array]], documents: Documents = NO_DOCUMENTS
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        x_BTD, totals = carry
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), documents)
        y_BTD, metrics = self.experts(self.mlp_norm(x_BTD))
        return x_BTD + y_BTD, jax.tree.map(jnp.add, totals, metrics)


class Mixtral(Llama):
    """Maps tokens to logits, and the means over the layers of the experts' metrics."""

    block = Block

    def __call__(  # type: ignore[override]
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None, positions_BT: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        carry = self.embedded(tokens_BT), {"balance": jnp.zeros(()), "dropped": jnp.zeros(())}
        x_BTD, totals = self.blocks(carry, (segments_BT, positions_BT))
        return self.logits(x_BTD), jax.tree.map(lambda total: total / self.config.num_layers, totals)


def loss(model: Mixtral, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean next-token cross-entropy in float32 plus the weighted load-balancing loss (1 if uniform).

    The metrics are both terms, and `dropped`: the share of routed tokens that exceed an expert's capacity.
    """
    logits_BTV, metrics = model(batch["inputs"], batch.get("segments"), batch.get("positions"))
    entropy = cross_entropy(logits_BTV, batch)
    return entropy + BALANCE_WEIGHT * metrics["balance"], {"cross_entropy": entropy} | metrics
