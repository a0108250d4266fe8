"""Shape: the one model, optimizer and data that every peer trains, and the numbers all of them start from.

Shape suffixes: L layers, B batch, T positions, V vocab, D embed, F mlp, H heads, K head_dim.
"""

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Shape:
    """A GPT-2 with tied embeddings and AdamW, without dropout and without clipping.

    `dtype` is what is computed in; weights, moments, logits and their loss are in float32.
    """

    num_layers: int = 6
    num_heads: int = 6
    embed_dim: int = 384
    seq_len: int = 256
    vocab_size: int = 4096
    batch_size: int = 16
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    dtype: str = "float32"

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.embed_dim // self.num_heads

    @property
    def num_tokens(self) -> int:
        """Tokens in a step."""
        return self.batch_size * self.seq_len

    @functools.cache  # noqa: B019  (a peer asks for them an array at a time, and has one shape)
    def weights(self) -> dict[str, np.ndarray]:
        """What every peer starts from, by name; the arrays of the blocks have a first dim of L."""
        rng = np.random.default_rng(0)
        L, D, H, K = self.num_layers, self.embed_dim, self.num_heads, self.head_dim
        normal = {
            "embed": (self.vocab_size, D), "positions": (self.seq_len, D), "qkv": (L, D, 3, H, K), "out": (L, H, K, D),
            "up": (L, D, 4 * D), "down": (L, 4 * D, D),
        }  # fmt: skip
        zeros = {
            "qkv_bias": (L, 3, H, K), "out_bias": (L, D), "up_bias": (L, 4 * D), "down_bias": (L, D),
            "norm1_bias": (L, D), "norm2_bias": (L, D), "norm_bias": (D,),
        }  # fmt: skip
        ones = {"norm1_scale": (L, D), "norm2_scale": (L, D), "norm_scale": (D,)}
        made = {name: 0.02 * rng.standard_normal(shape, np.float32) for name, shape in normal.items()}
        made |= {name: np.zeros(shape, np.float32) for name, shape in zeros.items()}
        return made | {name: np.ones(shape, np.float32) for name, shape in ones.items()}

    def batches(self) -> Iterator[np.ndarray]:
        """Tokens (B, T + 1), int32, for ever: an order-1 chain, so that there is something to learn."""
        rng = np.random.default_rng(1)
        follows = rng.integers(0, self.vocab_size, (self.vocab_size, 4))
        while True:
            tokens_BT = np.empty((self.batch_size, self.seq_len + 1), np.int32)
            tokens_BT[:, 0] = rng.integers(0, self.vocab_size, self.batch_size)
            for t in range(self.seq_len):
                tokens_BT[:, t + 1] = follows[tokens_BT[:, t], rng.integers(0, 4, self.batch_size)]
            yield tokens_BT


def with_shape(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser that takes a shape, a flag a field."""
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return parser


def shape_of(args: argparse.Namespace, *dtypes: str) -> Shape:
    """The shape that was asked for, if it is in float32 or another dtype that the peer has."""
    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    if shape.dtype not in ("float32", *dtypes):
        raise SystemExit(f"this peer does not compute in {shape.dtype}")
    return shape


def with_layout(parser: argparse.ArgumentParser, *layouts: str) -> argparse.ArgumentParser:
    """A parser that takes a shape, and what the peers on JAX can be asked for."""
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layout", choices=layouts or None, default="data")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--flash", action="store_true", help="attention by the platform's kernel, where there is one")
    return with_shape(parser)
