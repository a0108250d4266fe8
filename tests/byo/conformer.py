"""Speech: convolutional subsampling, a Conformer block (GLU, depthwise convolution, BatchNorm), the CTC loss."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

DIM, TOKENS = 32, 16


class FeedForward(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + 0.5 * self.dropout(self.down(self.dropout(nnx.swish(self.up(self.norm(x))))))


class ConvModule(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.batch_norm = nnx.LayerNorm(DIM, rngs=rngs), nnx.BatchNorm(DIM, momentum=0.9, rngs=rngs)
        self.pointwise1, self.pointwise2 = nnx.Conv(DIM, 2 * DIM, (1,), rngs=rngs), nnx.Conv(DIM, DIM, (1,), rngs=rngs)
        self.depthwise = nnx.Conv(DIM, DIM, (5,), feature_group_count=DIM, rngs=rngs)

    def __call__(self, x):
        h = nnx.glu(self.pointwise1(self.norm(x)), axis=-1)
        return x + self.pointwise2(nnx.swish(self.batch_norm(self.depthwise(h))))


class Conformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.subsample = nnx.List([nnx.Conv(cin, 8, (3, 3), strides=(2, 2), rngs=rngs) for cin in (1, 8)])
        self.enter = nnx.Linear(8 * 4, DIM, rngs=rngs)
        self.ff1, self.ff2 = FeedForward(rngs=rngs), FeedForward(rngs=rngs)
        self.attention_norm, self.norm = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, DIM, decode=False, rngs=rngs)
        self.conv = ConvModule(rngs=rngs)
        self.head = nnx.Linear(DIM, TOKENS, rngs=rngs)

    def __call__(self, spectrogram, lengths):
        x = spectrogram[..., None]
        for conv in self.subsample:
            x = nnx.relu(conv(x))
        x = self.enter(x.reshape(*x.shape[:2], -1))
        is_padding = jnp.arange(x.shape[1]) >= lengths[:, None] // 4
        x = self.ff1(x)
        x = x + self.attention(self.attention_norm(x), mask=~is_padding[:, None, None, :])
        return self.head(self.norm(self.ff2(self.conv(x)))), is_padding


build = Conformer
# The gradients of a bias before a BatchNorm and of a key's bias under softmax are rounding, and nothing else.
looser = {"conv.depthwise.bias": 1e-3, "attention.key.bias": 1e-4}


def loss(model, batch):
    logits, is_padding = model(batch["spectrogram"], batch["lengths"])
    losses = optax.ctc_loss(logits, is_padding.astype(jnp.float32), batch["labels"], batch["label_padding"])
    return losses.mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "spectrogram": rng.normal(size=(size, 48, 16)).astype(np.float32),
        "lengths": rng.integers(32, 49, size).astype(np.int32),
        "labels": rng.integers(1, TOKENS, (size, 4)).astype(np.int32),
        "label_padding": (np.arange(4) >= rng.integers(1, 5, size)[:, None]).astype(np.float32),
    }
