"""Small models as people write them, none of them sharded: what every layout, trace and replay is tested on.

Shape suffixes: B batch, T and S positions, V vocab, D embed, F mlp, H heads, K head_dim, E experts, C capacity.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax import softmax_cross_entropy_with_integer_labels as softmax_cross_entropy

from spanax.models import gpt, images, llama, moe, resnet, unet, vit

# Some gradients are zero but for rounding (a key bias under softmax): eps keeps Adam from blowing that noise up.
ADAMW = optax.adamw(1e-3, eps=1e-5)
WARMUP = optax.adamw(optax.warmup_cosine_decay_schedule(1e-4, 1e-3, warmup_steps=3, decay_steps=10), eps=1e-5)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss, data for any batch size (dim 0 of every leaf), and how to train it."""

    build: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[[Any, dict], jax.Array]
    batch: Callable[..., dict]
    optimizer: optax.GradientTransformation = ADAMW
    wrt: Any = nnx.Param


def floats(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, size: rng.normal(size=(size, *shape)).astype(np.float32)


def ints(high: int, *shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, size: rng.integers(0, high, (size, *shape), dtype=np.int32)


def batches(**leaves: Callable[[np.random.Generator, int], np.ndarray]) -> Callable[..., dict]:
    def batch(size: int = 16) -> dict:
        return {name: make(np.random.default_rng(i), size) for i, (name, make) in enumerate(leaves.items())}

    return batch


def cross_entropy(model: Any, batch: dict) -> jax.Array:
    return softmax_cross_entropy(model(batch["x"]), batch["y"]).mean()


def squared_error(model: Any, batch: dict) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


TEXT = batches(x=ints(128, 32), y=ints(128, 32))  # language modelling: (B, T) to (B, T)
IMAGES = batches(x=floats(16, 16, 3), y=ints(16))  # image classification: (B, H, W, C) to (B,)
VECTORS = batches(x=floats(32), y=floats(16))  # regression: (B, D) to (B, D)
SERIES = batches(x=floats(24, 8), y=ints(16))  # classification of a time series: (B, T, D) to (B,)
CLICKS = batches(ids=ints(128, 8), weights=floats(8), dense=floats(8), click=ints(2), rating=floats(8))
GPT_TEXT = batches(inputs=ints(128, 32), targets=ints(128, 32))
GPT_SCAN = gpt.GPTConfig(vocab_size=128, seq_len=32, num_layers=3, num_heads=8, embed_dim=64, remat=True)
GPT_LIST = dataclasses.replace(GPT_SCAN, num_layers=2, scan_layers=False, remat=False)
LLAMA = llama.LlamaConfig(128, 32, num_layers=2, num_heads=8, num_kv_heads=4, embed_dim=64, mlp_dim=128, remat=True)
QWEN = dataclasses.replace(
    LLAMA, head_dim=16, rope_scaling=llama.RopeScaling(), qkv_bias=True, qk_norm=True, tied_embeddings=True
)
MIXTRAL = moe.MoEConfig(128, 32, num_layers=2, num_heads=8, num_kv_heads=4, embed_dim=64, mlp_dim=48, remat=True)
DROPLESS = dataclasses.replace(MIXTRAL, capacity_factor=None, remat=False)
VIT = vit.ViTConfig(16, 4, num_layers=2, num_heads=8, embed_dim=64, mlp_dim=128, num_classes=16, remat=True)
RESNET = resnet.ResNetConfig(16, stage_sizes=(2, 1), width=16, num_classes=16)
DDPM = unet.UNetConfig(16, width=16, multipliers=(1, 2), blocks_per_level=1, attention_size=8, num_groups=4)
LABELLED = batches(images=floats(16, 16, 3), labels=ints(16))


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.up = nnx.Linear(32, 128, rngs=rngs)
        self.mid = nnx.Linear(128, 128, rngs=rngs)
        self.down = nnx.Linear(128, 16, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs if rate else None)

    def __call__(self, x):
        x = self.drop(jax.nn.relu(self.up(x)))
        return self.down(self.drop(jax.nn.silu(self.mid(x))))


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 16, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.depthwise = nnx.Conv(16, 16, (3, 3), feature_group_count=16, use_bias=False, rngs=rngs)
        self.stem_norm, self.depthwise_norm = nnx.BatchNorm(16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.pointwise = nnx.Conv(16, 32, (1, 1), rngs=rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.stem_norm(self.stem(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = jax.nn.relu(self.depthwise_norm(self.depthwise(x)))
        x = nnx.avg_pool(self.pointwise(x), (2, 2), strides=(2, 2))
        return self.head(x.mean((1, 2)))


def rope(x_BTHK):
    """Rotates pairs of channels by an angle that grows with the position."""
    half = x_BTHK.shape[-1] // 2
    angle_TK = jnp.arange(x_BTHK.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle_TK)[:, None], jnp.cos(angle_TK)[:, None]
    a, b = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class LlamaBlock(nnx.Module):
    """Grouped queries (8 heads share 4 keys and values), rotary positions, RMSNorm, SwiGLU."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(64, rngs=rngs), nnx.RMSNorm(64, rngs=rngs)
        self.q = nnx.LinearGeneral(64, (8, 8), use_bias=False, rngs=rngs)
        self.k, self.v = (nnx.LinearGeneral(64, (4, 8), use_bias=False, rngs=rngs) for _ in range(2))
        self.out = nnx.LinearGeneral((8, 8), 64, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.gate, self.up = (nnx.Linear(64, 128, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = self.attention_norm(x)
        q, k, v = rope(self.q(h)), rope(self.k(h)), self.v(h)
        q = q.reshape(*q.shape[:2], 4, 2, 8)  # 2 queries a group
        scores = jnp.einsum("btgqk,bsgk->bgqts", q, k) / 8**0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(scores.dtype).min)
        h = jnp.einsum("bgqts,bsgk->btgqk", jax.nn.softmax(scores), v)
        x = x + self.out(h.reshape(*h.shape[:2], 8, 8))
        h = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class MoEBlock(nnx.Module):
    """Top-2 of 8 experts with a capacity, by one-hot dispatch and combine (GShard)."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.1)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.router = nnx.Linear(32, 8, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (8, 32, 64)))
        self.down = nnx.Param(init(rngs.params(), (8, 64, 32)))

    def __call__(self, x_BTD):
        h_BTD, capacity = self.norm(x_BTD), 2 * x_BTD.shape[1] // 8 + 2
        gates_BT2, chosen_BT2 = jax.lax.top_k(jax.nn.softmax(self.router(h_BTD)), 2)
        gates_BT2 = gates_BT2 / gates_BT2.sum(-1, keepdims=True)
        chosen_BT2E = jax.nn.one_hot(chosen_BT2, 8)
        flat_BSE = chosen_BT2E.reshape(x_BTD.shape[0], -1, 8)  # a token's place in its expert's queue
        place_BT2E = (jnp.cumsum(flat_BSE, axis=1) - 1).reshape(chosen_BT2E.shape)
        slot_BT2EC = chosen_BT2E[..., None] * jax.nn.one_hot(place_BT2E.astype(jnp.int32), capacity)
        combine_BTEC = jnp.einsum("btn,btnec->btec", gates_BT2, slot_BT2EC)
        h_EBCD = jnp.einsum("btec,btd->ebcd", slot_BT2EC.sum(2), h_BTD)
        h_EBCF = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", h_EBCD, self.up[...]))
        h_EBCD = jnp.einsum("ebcf,efd->ebcd", h_EBCF, self.down[...])
        return x_BTD + jnp.einsum("btec,ebcd->btd", combine_BTEC, h_EBCD)


class IndexedMoEBlock(MoEBlock):
    """The same, each token written into its place by number and read out of it: no product with one-hots."""

    def __call__(self, x_BTD):
        h_BTD, capacity = self.norm(x_BTD), 2 * x_BTD.shape[1] // 8 + 2
        gates_BT2, chosen_BT2 = jax.lax.top_k(jax.nn.softmax(self.router(h_BTD)), 2)
        chosen_BS = chosen_BT2.reshape(x_BTD.shape[0], -1)
        flat_BSE = jax.nn.one_hot(chosen_BS, 8, dtype=jnp.int32)
        place_BS = ((jnp.cumsum(flat_BSE, axis=1) - 1) * flat_BSE).sum(-1)

        def write(h_SD, chosen_S, place_S):
            return jnp.zeros((8, capacity, 32)).at[chosen_S, place_S].add(h_SD, mode="drop")

        def read(h_ECD, chosen_S, place_S):
            return h_ECD.at[chosen_S, place_S].get(mode="fill", fill_value=0.0)

        h_BECD = jax.vmap(write)(jnp.repeat(h_BTD, 2, axis=1), chosen_BS, place_BS)
        h_BECF = jax.nn.gelu(jnp.einsum("becd,edf->becf", h_BECD, self.up[...]))
        h_BECD = jnp.einsum("becf,efd->becd", h_BECF, self.down[...])
        y_BSD = jax.vmap(read)(h_BECD, chosen_BS, place_BS)
        return x_BTD + (y_BSD.reshape(*gates_BT2.shape, -1) * gates_BT2[..., None]).sum(2)


class Decoder(nnx.Module):
    """Embedding, some blocks, a head."""

    def __init__(self, rngs: nnx.Rngs, blocks: list[Callable[[nnx.Rngs], nnx.Module]], dim: int, tie: bool = False):
        self.embed = nnx.Embed(128, dim, rngs=rngs)
        self.blocks = nnx.List([block(rngs) for block in blocks])
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = None if tie else nnx.Linear(dim, 128, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if self.head else self.embed.attend(x)


def rnn(rngs: nnx.Rngs) -> nnx.Sequential:
    lstm = nnx.RNN(nnx.LSTMCell(8, 32, rngs=rngs))
    gru = nnx.RNN(nnx.GRUCell(32, 32, rngs=rngs), reverse=True, keep_order=True)
    return nnx.Sequential(lstm, gru, lambda x: x[:, 0], nnx.Linear(32, 16, rngs=rngs))


class SelfAttention(nnx.Module):
    """The fused projection of most hand-written transformers: one matrix to 3 D, split, then cut into heads."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.qkv = nnx.Linear(64, 192, rngs=rngs)
        self.out = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        b, t, d = x.shape
        q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        q, k, v = (y.reshape(b, t, 8, d // 8).transpose(0, 2, 1, 3) for y in (q, k, v))
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / (d // 8) ** 0.5)
        return x + self.out((weights @ v).transpose(0, 2, 1, 3).reshape(b, t, d))


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.patch = nnx.Linear(4 * 4 * 3, 64, rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, 64)))
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, 17, 64)))
        self.attention = SelfAttention(rngs)
        self.head = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        b, h, w, c = x.shape
        x = x.reshape(b, h // 4, 4, w // 4, 4, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, 16 * c)
        x = jnp.concatenate([jnp.tile(self.cls[...], (b, 1, 1)), self.patch(x)], axis=1) + self.positions
        return self.head(self.attention(x)[:, 0])


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.down = nnx.Conv(16, 32, (3, 3), strides=(2, 2), rngs=rngs)
        self.norm = nnx.GroupNorm(32, num_groups=4, rngs=rngs)
        self.up = nnx.ConvTranspose(32, 16, (2, 2), strides=(2, 2), rngs=rngs)
        self.leave = nnx.Conv(32, 3, (3, 3), rngs=rngs)

    def __call__(self, x):
        skip = jax.nn.silu(self.enter(x))
        x = self.up(jax.nn.silu(self.norm(self.down(skip))))
        return self.leave(jnp.concatenate([x, skip], axis=-1))


class Seq2Seq(nnx.Module):
    """Encoder and decoder of different lengths, joined by cross-attention."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(128, 64, rngs=rngs)
        self.encoder = SelfAttention(rngs)
        self.attention = nnx.MultiHeadAttention(8, 64, decode=False, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(8, 64, normalize_qk=True, decode=False, rngs=rngs)

    def __call__(self, source, target):
        memory, x = self.encoder(self.embed(source)), self.embed(target)
        x = x + self.attention(x, mask=nnx.make_causal_mask(target))
        return self.embed.attend(x + self.cross(x, memory))


def seq2seq_loss(model: Seq2Seq, batch: dict) -> jax.Array:
    return softmax_cross_entropy(model(batch["x"], batch["y"])[:, :-1], batch["y"][:, 1:]).mean()


def lora(rngs: nnx.Rngs) -> nnx.Sequential:
    """A frozen base with trained low-rank additions."""
    up = nnx.LoRALinear(32, 128, lora_rank=8, rngs=rngs)
    down = nnx.LoRA(128, 8, 16, base_module=nnx.Linear(128, 16, rngs=rngs), rngs=rngs)
    return nnx.Sequential(up, jax.nn.gelu, down)


def attention(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(8, 64, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs)


class SSM(nnx.Module):
    """A gated linear recurrence over time, by associative scan and by a loop with a state."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(8, 64, rngs=rngs)
        self.gate = nnx.Linear(64, 64, rngs=rngs)
        self.decay = nnx.Param(jnp.linspace(-3.0, 0.0, 64))
        self.head = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = self.enter(x)
        a = jax.nn.sigmoid(self.gate(x))
        _, h = jax.lax.associative_scan(lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1]), (a, (1 - a) * x), axis=1)
        keep = jnp.exp(-jnp.exp(self.decay[...]))
        last, _ = jax.lax.scan(lambda s, u: (keep * s + u, None), jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))
        return self.head(last)


class Window(nnx.Module):
    """Attention inside shifted 4 x 4 windows (Swin)."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Conv(3, 64, (1, 1), rngs=rngs)
        self.attention = SelfAttention(rngs)
        self.head = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = jnp.roll(self.enter(x), (-2, -2), axis=(1, 2))
        b, h, w, c = x.shape
        x = x.reshape(b, h // 4, 4, w // 4, 4, c).swapaxes(2, 3).reshape(-1, 16, c)
        x = self.attention(x).reshape(b, h // 4, w // 4, 4, 4, c).swapaxes(2, 3).reshape(b, h, w, c)
        return self.head(jnp.roll(x, (2, 2), axis=(1, 2)).max((1, 2)))


class VAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encode = nnx.Linear(32, 2 * 16, rngs=rngs)
        self.decode = nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), jax.nn.relu, nnx.Linear(64, 32, rngs=rngs))
        self.rngs = rngs


def vae_loss(model: VAE, batch: dict) -> jax.Array:
    mean, log_var = jnp.split(model.encode(batch["x"]), 2, axis=-1)
    z = mean + jnp.exp(0.5 * log_var) * model.rngs.normal(mean.shape)
    kl = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, axis=-1)
    return jnp.mean(jnp.sum((model.decode(z) - batch["x"]) ** 2, axis=-1) + kl)


def tied(rngs: nnx.Rngs) -> Decoder:
    """One block used three times (ALBERT), one matrix for embedding and head."""
    block = LlamaBlock(rngs)
    return Decoder(rngs, [lambda rngs: block] * 3, 64, tie=True)


def sequential(rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(
        nnx.Conv(3, 16, (3, 3), padding="VALID", rngs=rngs),
        jax.nn.relu,
        lambda x: nnx.max_pool(x, (2, 2), (2, 2)),
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Linear(7 * 7 * 16, 16, rngs=rngs),
    )


class MultiTask(nnx.Module):
    """A bag of embeddings and dense features (DLRM), two heads."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(128, 32, rngs=rngs)
        self.dense = nnx.Linear(8, 32, rngs=rngs)
        self.click = nnx.Linear(64, 1, rngs=rngs)
        self.rating = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, ids, weights, dense):
        bag = jnp.sum(self.embed(ids) * weights[..., None], axis=1)
        h = jax.nn.relu(jnp.concatenate([bag, self.dense(dense)], axis=-1))
        return self.click(h)[:, 0], self.rating(h)


def multitask_loss(model: MultiTask, batch: dict) -> jax.Array:
    click, rating = model(batch["ids"], batch["weights"], batch["dense"])
    clicks = optax.sigmoid_binary_cross_entropy(click, batch["click"])
    return clicks.mean() + optax.l2_loss(rating, batch["rating"]).mean()


def annotated(rngs: nnx.Rngs) -> nnx.Sequential:
    """Names of axes in the model, as MaxText and the Flax guides write them; no mesh needed to build it."""

    def linear(fan_in: int, fan_out: int, names: tuple[str, str]) -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        return nnx.Linear(fan_in, fan_out, kernel_init=init, rngs=rngs)

    with nnx.use_eager_sharding(False):
        return nnx.Sequential(linear(32, 128, ("embed", "mlp")), jax.nn.gelu, linear(128, 16, ("mlp", "embed")))


def mixed_dtype(rngs: nnx.Rngs) -> nnx.Sequential:
    """Most parameters and matrix products in bfloat16, norm and head in float32."""
    half = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)
    widen, narrow = nnx.Linear(32, 128, **half), nnx.Linear(128, 64, **half)
    norm, head = nnx.LayerNorm(64, dtype=jnp.float32, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
    return nnx.Sequential(widen, jax.nn.gelu, narrow, norm, head)


def mixer(rngs: nnx.Rngs) -> nnx.Sequential:
    """A linear layer over time, then one over channels."""
    time, channels = nnx.Linear(24, 24, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
    return nnx.Sequential(lambda x: x.mT, time, jax.nn.gelu, lambda x: x.mT, channels, lambda x: x.mean(1))


class CLIP(nnx.Module):
    """Two towers; every example is scored against the full batch."""

    def __init__(self, rngs: nnx.Rngs):
        self.image, self.text = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(16, 64, rngs=rngs)
        self.scale = nnx.Param(jnp.asarray(1.0))


def clip_loss(model: CLIP, batch: dict) -> jax.Array:
    unit = lambda v: v / jnp.linalg.norm(v, axis=-1, keepdims=True)  # noqa: E731
    logits = jnp.exp(model.scale) * unit(model.image(batch["x"])) @ unit(model.text(batch["y"])).T
    return sum(softmax_cross_entropy(z, jnp.arange(len(z))).mean() for z in (logits, logits.T))


ZOO = {
    "gpt": Case(lambda rngs: gpt.GPT(GPT_SCAN, rngs), gpt.loss, GPT_TEXT),
    "gpt-unrolled": Case(lambda rngs: gpt.GPT(GPT_LIST, rngs), gpt.loss, GPT_TEXT),
    "mlp": Case(MLP, squared_error, VECTORS),
    "cnn": Case(CNN, cross_entropy, IMAGES),
    "dropout": Case(lambda rngs: MLP(rngs, rate=0.3), squared_error, VECTORS),
    "gqa": Case(lambda rngs: Decoder(rngs, [LlamaBlock] * 2, 64), cross_entropy, TEXT),
    "moe": Case(lambda rngs: Decoder(rngs, [MoEBlock] * 2, 32), cross_entropy, TEXT),
    "indexed-moe": Case(lambda rngs: Decoder(rngs, [IndexedMoEBlock], 32), cross_entropy, TEXT),
    "rnn": Case(rnn, cross_entropy, SERIES),
    "vit": Case(ViT, cross_entropy, IMAGES),
    "unet": Case(UNet, squared_error, batches(x=floats(16, 16, 3), y=floats(16, 16, 3))),
    "seq2seq": Case(Seq2Seq, seq2seq_loss, batches(x=ints(128, 24), y=ints(128, 32))),
    "lora": Case(lora, squared_error, VECTORS, wrt=nnx.LoRAParam),
    "nnx-attention": Case(lambda rngs: Decoder(rngs, [attention] * 2, 64), cross_entropy, TEXT),
    "fused-qkv": Case(lambda rngs: Decoder(rngs, [SelfAttention], 64), cross_entropy, TEXT, WARMUP),
    "ssm": Case(SSM, cross_entropy, SERIES, optax.adafactor(1e-3, min_dim_size_to_factor=32)),
    "window": Case(Window, cross_entropy, IMAGES),
    "vae": Case(VAE, vae_loss, batches(x=floats(32))),
    "tied": Case(tied, cross_entropy, TEXT),
    "sequential": Case(sequential, cross_entropy, IMAGES, optax.sgd(1e-2, momentum=0.9)),
    "multitask": Case(MultiTask, multitask_loss, CLICKS, optax.adagrad(1e-2)),
    "annotated": Case(annotated, squared_error, VECTORS),
    "mixed-dtype": Case(mixed_dtype, squared_error, VECTORS),
    "mixer": Case(mixer, cross_entropy, SERIES, optax.chain(optax.clip_by_global_norm(1.0), ADAMW)),
    "clip": Case(CLIP, clip_loss, VECTORS),
    "llama": Case(lambda rngs: llama.Llama(LLAMA, rngs), llama.loss, GPT_TEXT),
    "mixtral": Case(lambda rngs: moe.Mixtral(MIXTRAL, rngs), moe.loss, GPT_TEXT),
    "qwen": Case(lambda rngs: llama.Llama(QWEN, rngs), llama.loss, GPT_TEXT),
    "dropless": Case(lambda rngs: moe.Mixtral(DROPLESS, rngs), moe.loss, GPT_TEXT),
    "ddpm": Case(lambda rngs: unet.UNet(DDPM, rngs), unet.loss, batches(images=floats(16, 16, 3))),
    "vit-scan": Case(lambda rngs: vit.ViT(VIT, rngs), images.loss, LABELLED),
    "resnet": Case(lambda rngs: resnet.ResNet(RESNET, rngs), images.loss, LABELLED),
}
