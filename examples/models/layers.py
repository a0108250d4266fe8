"""What the decoders of this folder share: RMSNorm, rotary positions, attention, the gated MLP. Plain Flax NNX.

Shape suffixes: B batch, T and S positions of queries and keys, D embed, F mlp, H and G their heads, K head_dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

INIT = nnx.initializers.normal(0.02)
gelu = partial(jax.nn.gelu, approximate=True)


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square, in float32; Gemma multiplies by one plus the scale: `offset=1`."""

    def __init__(self, dim: int, epsilon: float, rngs: nnx.Rngs, offset: float = 0.0):
        self.scale = nnx.Param(jnp.full((dim,), 1.0 - offset))
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return (normed * (self.offset + self.scale[...])).astype(x.dtype)


def heads(in_dim: int, num_heads: int, head_dim: int, rngs: nnx.Rngs, use_bias: bool = False) -> nnx.LinearGeneral:
    """Returns the projection to heads."""
    return nnx.LinearGeneral(in_dim, (num_heads, head_dim), use_bias=use_bias, kernel_init=INIT, rngs=rngs)


def merged(num_heads: int, head_dim: int, out_dim: int, rngs: nnx.Rngs, use_bias: bool = False) -> nnx.LinearGeneral:
    """Returns the projection from heads."""
    shape = (num_heads, head_dim)
    return nnx.LinearGeneral(shape, out_dim, axis=(-2, -1), use_bias=use_bias, kernel_init=INIT, rngs=rngs)


def rotate(x_BTHK: jax.Array, theta: float, share: float = 1.0) -> jax.Array:
    """Rotates the pairs of channels `i` and `i + n/2` of the first `n = share * K` channels."""
    rotated, rest = jnp.split(x_BTHK, [int(share * x_BTHK.shape[-1])], axis=-1)
    half = rotated.shape[-1] // 2
    angles = jnp.arange(x_BTHK.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = jnp.split(rotated, 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate([*turned, rest], axis=-1).astype(x_BTHK.dtype)


def attend(q_BTHK, k_BSGK, v_BSGK, *, scale=None, window=None, cap=None) -> jax.Array:
    """Causal attention, `H / G` queries to a key; to the last `window` positions, scores within `cap`, if given."""
    B, T, H, K = q_BTHK.shape
    G = k_BSGK.shape[2]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    scores_BGRTS = jnp.einsum("BTGRK,BSGK->BGRTS", q_BTGRK, k_BSGK) * (K**-0.5 if scale is None else scale)
    if cap is not None:
        scores_BGRTS = cap * jnp.tanh(scores_BGRTS / cap)
    ago_TS = jnp.arange(T)[:, None] - jnp.arange(T)
    seen_TS = ago_TS >= 0 if window is None else (ago_TS >= 0) & (ago_TS < window)
    weights_BGRTS = jax.nn.softmax(jnp.where(seen_TS, scores_BGRTS.astype(jnp.float32), -jnp.inf))
    return jnp.einsum("BGRTS,BSGK->BTGRK", weights_BGRTS.astype(q_BTHK.dtype), v_BSGK).reshape(q_BTHK.shape)


class GatedMLP(nnx.Module):
    """The gated MLP, without biases."""

    def __init__(self, embed_dim: int, mlp_dim: int, activation, rngs: nnx.Rngs):
        self.activation = activation
        self.gate = nnx.Linear(embed_dim, mlp_dim, use_bias=False, kernel_init=INIT, rngs=rngs)
        self.up = nnx.Linear(embed_dim, mlp_dim, use_bias=False, kernel_init=INIT, rngs=rngs)
        self.down = nnx.Linear(mlp_dim, embed_dim, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))
