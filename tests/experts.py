"""Layers of experts as the authors of other libraries write them; each computes what a form of `expert_forms` does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from expert_forms import CAPACITY, DIM, EXPERTS, FF, TOP, Arrays

UP, DOWN, ROUTER = (EXPERTS, DIM, FF), (EXPERTS, FF, DIM), (DIM, EXPERTS)


def probabilities(params: Arrays, x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x @ params["router"], axis=-1)


def of_expert(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.silu(x @ up) @ down


def flaxformer_masks(params: Arrays, x: jax.Array) -> jax.Array:
    """Two examples are a group; masks by priority of choices; experts are vmapped over slots of all groups."""
    groups = x.reshape(-1, 2 * x.shape[1], DIM)
    probs = probabilities(params, groups)
    _, index = lax.top_k(probs, TOP)
    preferred = jnp.swapaxes(index, 1, 2).reshape(len(groups), -1)
    mask = jax.nn.one_hot(preferred, EXPERTS, dtype=jnp.int32)
    priority = jnp.cumsum(mask, axis=1) * mask - 1.0
    priority = jnp.swapaxes(priority.reshape(len(groups), TOP, -1, EXPERTS), 1, 2).max(axis=2)
    dispatch = jax.nn.one_hot(priority.astype(jnp.int32), 2 * CAPACITY)
    combine = jnp.einsum("...te,...tec->...tec", probs, dispatch)
    slots = jnp.einsum("gt...,gtec->gec...", groups, dispatch)
    slots = jnp.swapaxes(slots, 0, 1).reshape(EXPERTS, -1, DIM)
    y = jax.vmap(of_expert)(slots, params["up"], params["down"])
    y = jnp.swapaxes(y.reshape(EXPERTS, len(groups), -1, DIM), 0, 1)
    return jnp.einsum("gec...,gtec->gt...", y, combine).reshape(x.shape)


def flaxformer_scatter(params: Arrays, x: jax.Array) -> jax.Array:
    """Slots are scattered by pairs of expert and place, and gathered by the same."""
    gate, index = lax.top_k(probabilities(params, x), TOP)
    preferred = jnp.swapaxes(index, 1, 2).reshape(len(x), -1)
    mask = jax.nn.one_hot(preferred, EXPERTS, dtype=jnp.int32)
    priority = (jnp.cumsum(mask, axis=1) * mask).reshape(len(x), TOP, -1, EXPERTS).max(axis=-1) - 1
    priority = jnp.swapaxes(priority, 1, 2)
    pairs = jnp.stack([index, priority], axis=-1).reshape(len(x), -1, 2)
    tokens = jnp.repeat(x, TOP, axis=1)
    put = lambda pairs, x: jnp.zeros((EXPERTS, CAPACITY, DIM)).at[tuple(pairs.T)].add(x)  # noqa: E731
    slots = jax.vmap(put)(pairs, tokens)
    y = jax.vmap(of_expert, in_axes=(1, 0, 0), out_axes=1)(slots, params["up"], params["down"])
    y = jax.vmap(lambda pairs, y: y.at[tuple(pairs.T)].get(mode="fill", fill_value=0))(pairs, y)
    return jnp.einsum("gtkd,gtk->gtd", y.reshape(*gate.shape, DIM), gate)


def maxtext_capacity(params: Arrays, x: jax.Array) -> jax.Array:
    """Masks of positions counted from one; experts before the batch."""
    gates, indices = lax.top_k(probabilities(params, x), TOP)
    row, column = jnp.ogrid[: x.shape[0], : x.shape[1]]
    probs = jnp.zeros((*x.shape[:2], EXPERTS)).at[row[..., None], column[..., None], indices].set(gates)
    mask = jax.nn.one_hot(indices, EXPERTS, dtype=jnp.int32)
    count = jnp.cumsum(mask.reshape(len(x), -1, EXPERTS), axis=1).reshape(mask.shape)
    kept = (mask * jnp.less_equal(count, CAPACITY)).sum(axis=2)
    position = (mask * count).sum(axis=2) * kept
    combine = (probs * kept)[..., None] * jax.nn.one_hot(position, CAPACITY + 1, dtype=jnp.int32)
    combine = combine[..., 1:]
    slots = jnp.einsum("BSM,BSEC->EBCM", x, combine.astype(bool))
    hidden = jax.nn.silu(jnp.einsum("EBCM,EMH->EBCH", slots, params["up"]))
    return jnp.einsum("EBCM,BSEC->BSM", jnp.einsum("EBCH,EHM->EBCM", hidden, params["down"]), combine)


def maxtext_dense(params: Arrays, x: jax.Array) -> jax.Array:
    """Every expert computes every token; its results are weighted last."""
    gates, indices = lax.top_k(probabilities(params, x), TOP)
    row, column = jnp.ogrid[: x.shape[0], : x.shape[1]]
    weights = jnp.zeros((*x.shape[:2], EXPERTS)).at[row[..., None], column[..., None], indices].set(gates)
    hidden = jax.nn.silu(jnp.einsum("BSM,EMH->BSEH", x, params["up"]))
    return jnp.einsum("BSEM,BSE->BSM", jnp.einsum("BSEH,EHM->BSEM", hidden, params["down"]), weights)


def maxtext_sorted(params: Arrays, x: jax.Array) -> jax.Array:
    """Tokens are repeated, permuted, and permuted back."""
    inputs = x.reshape(-1, DIM)
    weights, selected = lax.top_k(probabilities(params, inputs), TOP)
    order = jnp.argsort(jnp.ravel(selected))
    rows = jnp.take(jnp.repeat(inputs, TOP, axis=0), order, axis=0)
    sizes = jnp.bincount(jnp.ravel(selected), length=EXPERTS)
    y = lax.ragged_dot(jax.nn.silu(lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)
    y = jnp.take(y, jnp.argsort(order), axis=0).reshape(-1, TOP, DIM)
    return jnp.einsum("BKE,BK->BE", y, weights).reshape(x.shape)


def deepseek(params: Arrays, x: jax.Array) -> jax.Array:
    """Groups of experts are chosen first; sigmoid gates, normalized; rows are set by choice."""
    h = x.reshape(-1, DIM)
    scores = jax.nn.sigmoid(h @ params["router"])
    biased = (scores + jnp.linspace(0.0, 0.1, EXPERTS)).reshape(len(h), 4, -1)
    _, groups = lax.top_k(lax.top_k(biased, 2)[0].sum(-1), 2)
    allowed = jnp.zeros((len(h), 4), bool).at[jnp.arange(len(h))[:, None], groups].set(True)
    _, chosen = lax.top_k(jnp.where(allowed[..., None], biased, 0.0).reshape(len(h), -1), TOP)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    weights = 2.5 * weights / (weights.sum(-1, keepdims=True) + 1e-20)
    flat = chosen.ravel()
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(EXPERTS, jnp.int32).at[flat].add(1)
    y = lax.ragged_dot(jax.nn.silu(lax.ragged_dot(h[order // TOP], params["up"], sizes)), params["down"], sizes)
    y = jnp.zeros_like(y).at[order].set(y).reshape(len(h), TOP, DIM)
    return (y * weights[..., None]).sum(1).reshape(x.shape)


def megablox(params: Arrays, x: jax.Array) -> jax.Array:
    """Sorted by a key with its values; weights have outputs before inputs; sums by segment."""
    h = x.reshape(-1, DIM)
    weights, chosen = lax.top_k(probabilities(params, h), TOP)
    flat = chosen.reshape(-1)
    _, order = lax.sort_key_val(flat, jnp.arange(len(flat)))
    sizes = (flat[:, None] == jnp.arange(EXPERTS)).sum(0).astype(jnp.int32)
    rows = h[order // TOP]
    y = lax.ragged_dot(jax.nn.silu(lax.ragged_dot(rows, params["up"].swapaxes(1, 2), sizes)), params["down"], sizes)
    y = y * weights.reshape(-1)[order, None]
    return jax.ops.segment_sum(y, order // TOP, num_segments=len(h)).reshape(x.shape)


def mixtral(params: Arrays, x: jax.Array) -> jax.Array:
    """A loop over experts, each of which sees all tokens, and zeros where it was not chosen."""
    h = x.reshape(-1, DIM)
    weights, selected = lax.top_k(probabilities(params, h), TOP)
    out = jnp.zeros_like(h)
    for expert in range(EXPERTS):
        weight = jnp.where(selected == expert, weights, 0.0).sum(-1, keepdims=True)
        out += of_expert(h, params["up"][expert], params["down"][expert]) * weight
    return out.reshape(x.shape)


def scanned(params: Arrays, x: jax.Array) -> jax.Array:
    """The same loop as a scan."""
    h = x.reshape(-1, DIM)
    weights, selected = lax.top_k(probabilities(params, h), TOP)

    def add(out: jax.Array, expert: Any) -> tuple[jax.Array, None]:
        number, up, down = expert
        weight = jnp.where(selected == number, weights, 0.0).sum(-1, keepdims=True)
        return out + of_expert(h, up, down) * weight, None

    experts = jnp.arange(EXPERTS), params["up"], params["down"]
    return lax.scan(add, jnp.zeros_like(h), experts)[0].reshape(x.shape)


def vmapped(params: Arrays, x: jax.Array) -> jax.Array:
    """Experts are vmapped over the same tokens, and their results taken by the choices."""
    h = x.reshape(-1, DIM)
    weights, selected = lax.top_k(probabilities(params, h), TOP)
    y = jax.vmap(of_expert, in_axes=(None, 0, 0))(h, params["up"], params["down"])
    taken = jnp.take_along_axis(y, selected.T[..., None], axis=0)  # (TOP, tokens, DIM)
    return (taken * weights.T[..., None]).sum(0).reshape(x.shape)


def experts_last(params: Arrays, x: jax.Array) -> jax.Array:
    """The dim of experts is the last one of every weight."""
    gates, chosen = lax.top_k(probabilities(params, x), TOP)
    weights = jnp.einsum("btk,btke->bte", gates, jax.nn.one_hot(chosen, EXPERTS))
    hidden = jax.nn.silu(jnp.einsum("btd,dfe->btfe", x, params["up"]))
    return jnp.einsum("btfe,fde,bte->btd", hidden, params["down"], weights)


def weights_taken(params: Arrays, x: jax.Array) -> jax.Array:
    """Each token takes the weights of its experts."""
    gates, chosen = lax.top_k(probabilities(params, x), TOP)
    hidden = jax.nn.silu(jnp.einsum("btd,btkdf->btkf", x, params["up"][chosen]))
    return jnp.einsum("btkf,btkfd,btk->btd", hidden, params["down"][chosen], gates)


def experts_choose(params: Arrays, x: jax.Array) -> jax.Array:
    """Each expert chooses its tokens."""
    probs = jnp.swapaxes(probabilities(params, x), 1, 2)
    gates, chosen = lax.top_k(probs, CAPACITY)
    dispatch = jax.nn.one_hot(chosen, x.shape[1])
    slots = jnp.einsum("gect,gtd->gecd", dispatch, x)
    y = jnp.einsum("gecf,efd->gecd", jax.nn.silu(jnp.einsum("gecd,edf->gecf", slots, params["up"])), params["down"])
    return jnp.einsum("gecd,gec,gect->gtd", y, gates, dispatch)


STACKED = {"router": ROUTER, "up": UP, "down": DOWN}

CONVENTIONS: dict[str, tuple[str, Callable[[Arrays, jax.Array], jax.Array], dict[str, tuple[int, ...]]]] = {
    "flaxformer, masks": ("one-hot", flaxformer_masks, STACKED),
    "flaxformer, scatter": ("capacity", flaxformer_scatter, STACKED),
    "MaxText, capacity": ("one-hot", maxtext_capacity, STACKED),
    "MaxText, dense": ("dense", maxtext_dense, STACKED),
    "MaxText, sorted": ("sorted", maxtext_sorted, STACKED),
    "DeepSeek": ("sorted", deepseek, STACKED),
    "Megablox": ("sorted", megablox, STACKED | {"up": (EXPERTS, FF, DIM)}),
    "vmapped": ("dense", vmapped, STACKED),
    "experts last": ("dense", experts_last, {"router": ROUTER, "up": (DIM, FF, EXPERTS), "down": (FF, DIM, EXPERTS)}),
    "experts choose": ("one-hot", experts_choose, STACKED),
    "weights taken": ("dense", weights_taken, STACKED),
}
"""The form that each has, and the shapes of its weights."""

UNSEEN = {"Mixtral": mixtral, "scanned": scanned}
"""Layers in which no dim of experts is computed at once."""


class Layer(nnx.Module):
    """A layer of a convention, or of `UNSEEN`."""

    def __init__(self, name: str, rngs: nnx.Rngs):
        _, self.compute, shapes = CONVENTIONS.get(name) or ("", UNSEEN[name], STACKED)
        init = nnx.initializers.normal(0.1)
        self.weights = nnx.Dict({name: nnx.Param(init(rngs.params(), shape)) for name, shape in shapes.items()})

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.compute({name: weight[...] for name, weight in self.weights.items()}, x)
