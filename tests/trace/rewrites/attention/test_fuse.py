"""Attended: attention is found however it is written, and computes the same as one operation."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sampling import sampled
from spanax.errors import SpanaxError
from spanax.trace.jaxpr.graph import Graph, from_jaxpr
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.attention.operation import BACKWARD, FORWARD
from spanax.trace.rewrites.attention.scores import Form, shares

B, T, H, G, K = 2, 16, 4, 2, 8


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


Q, KV, ROWS = shape(B, T, H, K), shape(B, T, G, K), shape(B, T, H, K)
MASK, BIAS, REAL = shape(B, 1, T, T, dtype="bool"), shape(1, H, T, T), shape(B, T, dtype="bool")


def soft(scores: Any, v: Any) -> Any:
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)


def dots(q: Any, k: Any) -> Any:
    return jnp.einsum("bqhk,bshk->bhqs", q, k) / K**0.5


def plain(q: Any, k: Any, v: Any) -> Any:
    return soft(jnp.where(jnp.tril(jnp.ones((T, T), bool)), dots(q, k), -jnp.inf), v)


def window(q: Any, k: Any, v: Any) -> Any:
    at = jnp.arange(T)
    seen = (at[:, None] >= at) & (at[:, None] - at < 5)
    return soft(jnp.where(seen, jnp.tanh(dots(q, k)) * 5, -1e9), v)


def slopes(q: Any, k: Any, v: Any) -> Any:
    at = jnp.arange(T)
    scores = dots(q, k) - 2.0 ** -(jnp.arange(H)[:, None, None] + 1.0) * (at[:, None] - at)
    return soft(jnp.where(at[:, None] >= at, scores, -1e9), v)


def added(q: Any, k: Any, v: Any) -> Any:
    return soft(dots(q, k) + jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, -1e10), v)


def one_key(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhk,bsk->bhqs", q, k[:, :, 0])
    return jnp.einsum("bhqs,bsk->bqhk", jax.nn.softmax(scores), v[:, :, 0])


def one_example(q: Any, k: Any, v: Any) -> Any:
    return plain(q[:1], k[:1], v[:1])


def padding(q: Any, k: Any, v: Any, real: Any) -> Any:
    mask = nnx.combine_masks(nnx.make_causal_mask(real), nnx.make_attention_mask(real, real))
    return nnx.dot_product_attention(q, k, v, mask=mask)


def library(**inputs: Any) -> Callable[..., Any]:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **inputs)


def with_bias(q: Any, k: Any, v: Any, mask: Any, bias: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, mask=mask, bias=bias)


CAUSAL = [[3] * 4, *[[2] * 4] * 3]
ALL = [[1] * 4] * 4
# the attention, its operands, the extras it has, the work of each step and device of a ring of 4
WRITTEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, Any]] = {
    "plain": (plain, (Q, ROWS, ROWS), 0, CAUSAL),
    "library": (library(), (Q, ROWS, ROWS), 0, ALL),
    "library, causal, grouped": (library(is_causal=True), (Q, KV, KV), 0, CAUSAL),
    "mask and bias": (with_bias, (Q, ROWS, ROWS, MASK, BIAS), 2, ALL),
    "padding": (padding, (Q, ROWS, ROWS, REAL), 2, ALL),
    "window": (window, (Q, ROWS, ROWS), 0, [[3] * 4, [0, 3, 3, 3], [0] * 4, [0] * 4]),
    "slopes": (slopes, (Q, ROWS, ROWS), 0, CAUSAL),
    "added mask": (added, (Q, ROWS, ROWS), 0, CAUSAL),
    "one key for all heads": (one_key, (Q, ROWS, ROWS), 0, ALL),
    "one example": (one_example, (Q, ROWS, ROWS), 0, CAUSAL),
}


def graph_of(function: Callable[..., Any], *operands: Any) -> Graph:
    return from_jaxpr(jax.make_jaxpr(function)(*operands))


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops()]


def form_of(function: Callable[..., Any], operands: tuple[Any, ...]) -> Form:
    graph = graph_of(fuse_attention(function), *operands)
    (form,) = [op.params["form"] for op in graph.ops() if op.name == FORWARD]
    return form


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_is_recognized(name: str) -> None:
    function, operands, num_extras, work = WRITTEN[name]
    graph = graph_of(jax.grad(fuse_attention(lambda *args: function(*args).sum())), *operands)
    assert names(graph).count(FORWARD) == names(graph).count(BACKWARD) == 1
    large = [graph.shape(value) for op in graph.ops() for value in op.outputs if graph.shape(value)[-2:] == (T, T)]
    assert not large
    form = form_of(function, operands)
    assert len(form.extras) == num_extras
    assert shares(form, 4).work.tolist() == work


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("name", sampled(WRITTEN, [*WRITTEN][::5]))
def test_the_rewrite_computes_the_same(name: str) -> None:
    function, operands, _, _ = WRITTEN[name]
    random = np.random.default_rng(0)
    values = [
        jnp.asarray(
            random.random(operand.shape) > 0.3 if operand.dtype == bool else random.normal(size=operand.shape),
            operand.dtype,
        )
        for operand in operands
    ]
    floats = tuple(index for index, operand in enumerate(operands) if operand.dtype == np.float32)

    def squared(*args: Any) -> Any:
        return (function(*args) ** 2).sum()

    expected = jax.value_and_grad(squared, floats)(*values)
    result = jax.jit(jax.value_and_grad(fuse_attention(squared), floats))(*values)
    for mine, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * float(abs(theirs).max()))


def causal(real: Any, table: Any) -> Any:
    return jnp.where(nnx.make_causal_mask(real), 0.0, -jnp.inf)


def documents(real: Any, table: Any) -> Any:
    return jnp.where(nnx.make_causal_mask(real) * nnx.make_attention_mask(real, real) > 0, 0.0, -1e9)


def distances(real: Any, table: Any) -> Any:
    at = jnp.arange(T)
    return jnp.moveaxis(table[jnp.clip(at[:, None] - at + 4, 0, 8)], -1, 0)[None]


def halves(real: Any, table: Any) -> Any:
    """Of a table of half its size."""
    return jnp.concatenate([documents(real, table), documents(real, table)], axis=1)[:, :1]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("wrap", ["scan", "remat", "cond", "remat in scan"])
@pytest.mark.parametrize("mask, num_extras", [(causal, 0), (documents, 2), (distances, 1), (halves, 1)])
def test_a_mask_outside_of_layers_is_computed_in_each(wrap: str, mask: Callable[..., Any], num_extras: int) -> None:
    def run(x: Any, real: Any, table: Any) -> Any:
        bias = mask(real, table)

        def layer(x: Any) -> Any:
            return x + soft(dots(x, x) + bias, x)

        inner = jax.checkpoint(layer) if "remat" in wrap else layer
        if "scan" in wrap:
            return jax.lax.scan(lambda x, _: (inner(x), None), x, length=3)[0]
        return jax.lax.cond(x.sum() > 0, layer, lambda x: x, x) if wrap == "cond" else inner(x)

    arrays = (Q, REAL, shape(9, 4))
    assert len(form_of(run, arrays).extras) == num_extras
    graph = graph_of(jax.grad(fuse_attention(lambda *args: run(*args).sum()), (0, 2)), *arrays)
    large = [graph.shape(value) for op in graph.ops() for value in op.outputs if graph.shape(value)[-2:] == (T, T)]
    assert bool(large) == (mask is halves)
    random = np.random.default_rng(0)
    values = [random.normal(size=array.shape).astype("float32") for array in arrays]
    values[1] = values[1] > -1
    results = [
        jax.jit(jax.grad(lambda *args, run=run: (run(*args) ** 2).sum(), (0, 2)))(*values)
        for run in (run, fuse_attention(run))
    ]
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * float(abs(theirs).max()))


def test_attention_of_examples_that_a_loss_closes_over_is_recognized() -> None:
    def step(scale: Any, x: Any, temperature: Any) -> Any:
        attention = lambda scale: soft(dots(x * scale, x) / temperature, x)  # noqa: E731
        return fuse_attention(attention, num_states=1)(scale)

    assert names(graph_of(step, shape(K), Q, shape())).count(FORWARD) == 1


def test_dropout_on_weights_is_refused() -> None:
    def dropped(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(dots(q, k))
        retained = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
        return jnp.einsum("bhqs,bshk->bqhk", jnp.where(retained, weights / 0.9, 0), v)

    with pytest.raises(SpanaxError, match="dropout on its weights") as raised:
        jax.make_jaxpr(fuse_attention(dropped))(Q, ROWS, ROWS)
    assert "test_fuse.py" in str(raised.value)


def test_a_softmax_over_another_dim_is_unchanged() -> None:
    def over_queries(q: Any, k: Any, v: Any) -> Any:
        return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(dots(q, k), axis=-2), v)

    def with_mean(q: Any, k: Any, v: Any) -> Any:
        """A further term in the sum that depends on the key."""
        weights = jnp.exp(dots(q, k))
        return jnp.einsum("bhqs,bshk->bqhk", weights / (weights.sum(-1, keepdims=True) + weights), v)

    for function in (over_queries, with_mean):
        with pytest.raises(SpanaxError, match="no softmax attention"):
            jax.make_jaxpr(fuse_attention(function))(Q, ROWS, ROWS)


def test_attention_weights_read_elsewhere_are_also_computed() -> None:
    def reported(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(dots(q, k))
        return jnp.einsum("bhqs,bshk->bqhk", weights, v).sum() + weights.max()

    result = names(graph_of(fuse_attention(reported), Q, ROWS, ROWS))
    assert result.count(FORWARD) == 1 and result.count("dot_general") == 1


def test_devices_of_a_causal_ring_compute_equal_work() -> None:
    form = form_of(plain, (Q, ROWS, ROWS))
    for num_devices in (2, 4, 8):
        share = shares(form, num_devices)
        assert share.is_moved and (share.work == share.work[:, :1]).all()
        assert sorted(part for local in share.owned for part in local) == list(range(2 * num_devices))
        assert share.share == (2 * num_devices + 1) / (4 * num_devices)
    assert not shares(form_of(library(), (Q, ROWS, ROWS)), 4).is_moved
    assert shares(form, 16).owned[0] == (0,)  # 16 places in 16 devices have no halves


# of each the scale and whether later keys are masked, if a kernel can take it, or a part of the reason why not
KERNELS: dict[str, tuple[float, bool] | str] = {
    "plain": (8**-0.5, True),
    "library": (8**-0.5, False),
    "library, causal, grouped": (8**-0.5, True),
    "mask and bias": "a bias of logits",
    "padding": "a mask of segments, which cudnn does not support",
    "window": "a soft cap, which cudnn does not support",
    "slopes": "a bias of logits",
    "added mask": (8**-0.5, True),
    "one key for all heads": (1.0, False),
    "one example": (8**-0.5, True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_kernel_supports_scale_and_mask_or_states_a_reason(name: str) -> None:
    function, operands, *_ = WRITTEN[name]
    half = [
        shape(*operand.shape, dtype="bfloat16" if operand.dtype == jnp.float32 else str(operand.dtype))
        for operand in operands
    ]
    outcomes: list[FusedAttention] = []
    jaxpr = jax.make_jaxpr(fuse_attention(function, "cudnn", outcomes))(*half)
    results = [op.params["kernel"] for op in from_jaxpr(jaxpr).ops() if op.name == FORWARD]
    expected = KERNELS[name]
    if isinstance(expected, str):
        assert not results and expected in str(outcomes[0]) and re.match(r"plain at \w+\.py:", str(outcomes[0]))
    else:
        (kernel,) = results
        assert (kernel.name, kernel.is_causal) == ("cudnn", expected[1])
        assert kernel.scale == pytest.approx(expected[0], rel=5e-3)  # the model rounds it to 16 bits, too


def bottleneck(weights: Any, x: Any) -> Any:
    up, down = weights
    return ((jax.nn.softmax(x @ up) @ down) ** 2).mean()


@pytest.mark.parametrize("context", ["ring", "cudnn"])
def test_products_with_weights_are_not_attention(context: str) -> None:
    """A softmax over classes between two heads has the structure of attention, with weights as keys and values."""
    operands = (shape(K, H), shape(H, K)), shape(B, T, K)
    outcomes: list[FusedAttention] = []
    fused = fuse_attention(bottleneck, context, outcomes, num_states=1)
    if context == "ring":
        with pytest.raises(SpanaxError, match="the loss has no softmax attention"):
            jax.make_jaxpr(fused)(*operands)
        assert FORWARD in names(graph_of(fuse_attention(bottleneck), *operands))
    else:
        jax.make_jaxpr(fused)(*operands)
        assert [str(outcome) for outcome in outcomes] == ["plain: the loss has no softmax attention"]


def test_keys_of_a_loop_that_examples_reach_late_are_attended() -> None:
    """In the first iteration the keys are weights; in later ones they depend on the batch."""

    def loss(weights: Any, x: Any) -> Any:
        def layer(carry: Any, _: Any) -> Any:
            memory, q = carry
            out = soft(dots(q, memory), memory)
            return (out, q + out), None

        (_, out), _ = jax.lax.scan(layer, (jnp.broadcast_to(weights, x.shape), x), None, length=3)
        return (out**2).mean()

    graph = graph_of(fuse_attention(loss, num_states=1), shape(H, K), Q)
    assert FORWARD in names(graph)
