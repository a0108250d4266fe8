"""Kernels: an attention that a platform's kernel computes has the numbers of the one that the model wrote."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import masks
import spanax
from sampling import sampled
from spanax.step.attention import kernels
from spanax.trace.optimizers.wrapped import PREFIX
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.attention.operation import BACKWARD, FORWARD, attention_grad_p, attention_p

B, T, H, G, K = 2, 256, 4, 2, 16
TOLERANCE = 2e-5
"""Largest difference over the largest value, in float32."""


def causal(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def written_down(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * 0.3
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)


WRITTEN: dict[str, tuple[Callable[..., Any], int, int]] = {
    "causal": (causal, H, T),
    "grouped heads": (causal, G, T),
    "half as many keys": (written_down, H, T // 2),
}


def gradients(function: Callable[..., Any], operands: Any) -> Any:
    weigh = jax.random.normal(jax.random.key(9), (B, T, H, K))
    return jax.value_and_grad(lambda *inputs: (function(*inputs) * weigh).sum(), argnums=(0, 1, 2))(*operands)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Splash attention, interpreted, in place of the computation block by block; and its arguments."""
    asked: list[str] = []

    def forward(*operands: Any, form: Any, dtype: Any, kernel: Any) -> Any:
        asked.append(FORWARD)
        return kernels.splash_forward(kernel, form, dtype, operands, interpret=True)

    def backward(*operands: Any, form: Any, grads: Any, kernel: Any) -> Any:
        asked.append(BACKWARD)
        return kernels.splash_backward(kernel, form, operands, interpret=True)

    for primitive, run in ((attention_p, forward), (attention_grad_p, backward)):
        monkeypatch.setattr(primitive, "impl", run)
    return asked


@pytest.mark.parametrize("name", sampled(WRITTEN, ["grouped heads"]))
def test_splash_has_the_numbers_of_the_model(name: str, interpreted: list[str]) -> None:
    function, heads, num_keys = WRITTEN[name]
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((B, T, H, K), (B, num_keys, heads, K), (B, num_keys, heads, K))
    operands = [jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True)]
    reported: list[FusedAttention] = []
    actual = gradients(fuse_attention(function, "splash", reported), operands)
    assert interpreted == [FORWARD, BACKWARD] and str(reported[0]).startswith("splash for 256 x")
    for leaf, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(gradients(function, operands)), strict=True):
        assert float(jnp.abs(leaf - expected).max()) <= TOLERANCE * float(jnp.abs(expected).max())


def of_operands(function: Callable[[masks.Inputs], Any], given: masks.Inputs) -> Callable[..., Any]:
    return lambda q, k, v: function(given | {"q": q, "k": k, "v": v})


def check_gradients(name: str, context: str) -> None:
    function, _ = masks.MASKS[name]
    given = jax.tree.map(jnp.asarray, masks.inputs())  # NumPy arrays would be masks that are stored
    operands = [given[name] for name in "qkv"]
    actual = gradients(fuse_attention(of_operands(function, given), context), operands)
    expected = gradients(of_operands(function, given), operands)
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(leaf - other).max()) <= TOLERANCE * float(jnp.abs(other).max())


@pytest.mark.parametrize("name", sampled(masks.MASKS, ["padded documents", "sink of documents"]))
def test_splash_has_the_numbers_of_every_mask(name: str, interpreted: list[str]) -> None:
    check_gradients(name, "splash")
    assert interpreted == [FORWARD, BACKWARD]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["splash", "ring"])
@pytest.mark.parametrize("name", masks.MASKS)
def test_blocks_have_the_numbers_of_every_mask(name: str, context: str) -> None:
    check_gradients(name, context)


@pytest.mark.parametrize(
    ("kernel", "platform", "calls"),
    [
        ("splash", "tpu", {"tpu_custom_call"}),
        ("cudnn", "cuda", {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}),
        ("splash", "cpu", set()),
        ("cudnn", "tpu", set()),
    ],
)
def test_each_kernel_is_called_on_its_platform_and_nowhere_else(kernel: str, platform: str, calls: set[str]) -> None:
    q, k = (jax.ShapeDtypeStruct((B, T, heads, 64), "bfloat16") for heads in (H, G))
    of_loss = jax.grad(
        fuse_attention(lambda q, k, v: causal(q, k, v).astype("float32").sum(), kernel), argnums=(0, 1, 2)
    )
    text = jax.jit(of_loss).trace(q, k, k).lower(lowering_platforms=(platform,)).as_text()
    assert set(re.findall(r"custom_call @([\w$]+)", text)) == calls


class Model(nnx.Module):
    """One attention with query heads that share key heads; keys may be those of the first tokens only."""

    def __init__(self, num_keys: int, num_groups: int, is_causal: bool, rngs: nnx.Rngs):
        self.num_keys, self.is_causal = num_keys, is_causal
        self.embed = nnx.Embed(32, K, rngs=rngs)
        self.q = nnx.LinearGeneral(K, (H, 8), rngs=rngs)
        self.k, self.v = (nnx.LinearGeneral(K, (num_groups, 8), use_bias=False, rngs=rngs) for _ in range(2))
        self.out = nnx.LinearGeneral((H, 8), 32, axis=(-2, -1), rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        keys = x[:, : self.num_keys]
        return self.out(jax.nn.dot_product_attention(self.q(x), self.k(keys), self.v(keys), is_causal=self.is_causal))


class Masked(nnx.Module):
    """One attention of `masks`; batches have segments and lengths."""

    def __init__(self, name: str, rngs: nnx.Rngs):
        self.attend = masks.ATTENTIONS[name]
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.q, self.k, self.v = (
            nnx.LinearGeneral(16, (heads, masks.K), use_bias=False, rngs=rngs) for heads in (masks.H, masks.G, masks.G)
        )
        self.out = nnx.LinearGeneral((masks.H, masks.K), 32, axis=(-2, -1), rngs=rngs)
        self.sinks = nnx.Param(jnp.linspace(0.0, 1.0, masks.H))
        self.table = nnx.Param(jax.random.normal(rngs.params(), (32, masks.H)))

    def __call__(self, batch: dict[str, Any]) -> Any:
        x = self.embed(batch["x"])
        given = batch | {"q": self.q(x) * 3, "k": self.k(x) * 3, "v": self.v(x)}
        return self.out(self.attend(given | {"sinks": self.sinks[...], "table": self.table[...]}))


def masked_loss(model: Masked, batch: dict[str, Any]) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["y"]).mean()


@functools.cache
def masked_program(name: str, shape: tuple[int, int]) -> spanax.Program:
    batch = {name: np.zeros(shape, np.int32) for name in "xy"}
    batch |= {name: masks.inputs(0, shape[1], shape[0])[name] for name in ("segments", "lengths")}
    build = functools.partial(Masked, name)
    return spanax.trace(build=lambda rngs: build(rngs=rngs), optimizer=optax.sgd(0.1), batch=batch, loss=masked_loss)


def loss(model: Model, batch: dict[str, Any]) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def numbers(
    shape: tuple[int, int], build: Callable[..., Model], context: str, *, in_ring: bool = False, **asked: Any
) -> dict[str, np.ndarray]:
    """The loss of an evaluation and of a step, and every gradient of the step."""
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 32, shape, dtype=np.int32) for name in "xy"}
    is_masked = getattr(build, "func", None) is Masked
    if is_masked:
        batch |= {name: masks.inputs(1, shape[1], shape[0])[name] for name in ("segments", "lengths")}
    chosen = masked_loss if is_masked else loss
    traced = spanax.trace(build=lambda rngs: build(rngs=rngs), optimizer=optax.sgd(0.1), batch=batch, loss=chosen)
    with_gradients = traced.variant(records_gradients=True)
    program = with_gradients.variant(context=context)
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8" if "mesh" in asked else "cpu:1"), **asked))
    assert run.plan.schedule.context == context
    assert ("collective_permute" in run.lower().as_text()) == in_ring
    result = {"evaluated": run.evaluate(batch)["loss"], "loss": run.step(batch)["loss"]}
    result |= {path: array for path, array in run.arrays().items() if path.startswith(PREFIX)}
    return {path: np.asarray(array) for path, array in result.items()}


# Rows and length, keys, groups of heads, causal, mesh; rings by their name.
SHARDED = {
    "groups of heads": ((4, 256), 256, 2, True, "data=2,context=2,model=2"),
    "heads of one group": ((8, 256), 256, 1, True, "data=2,model=4"),
    "a ring of several examples": ((2, 1024), 1024, 4, False, "context=4,model=2"),
    "a ring of half of the heads": ((1, 2048), 2048, 2, True, "context=4,model=2"),
    "queries with all keys": ((2, 2048), 128, 4, False, "data=1,context=8"),
}


@pytest.mark.parametrize("name", sampled(SHARDED, ["heads of one group"]))
def test_a_step_with_a_kernel_equals_the_model_on_every_mesh(name: str) -> None:
    shape, num_keys, num_groups, is_causal, mesh = SHARDED[name]
    build = functools.partial(Model, num_keys, num_groups, is_causal)
    expected = numbers(shape, build, "gathered", layout="data")
    actual = numbers(shape, build, "splash", mesh=mesh, in_ring="ring" in name)
    assert actual.keys() == expected.keys() and len(actual) > 4
    for path, array in expected.items():
        assert np.abs(actual[path] - array).max() <= TOLERANCE * np.abs(array).max(), path


# Context, rows and length, mesh, and the masks that its ring supports; None without a ring.
EVERYWHERE: dict[str, tuple[str, tuple[int, int], str, Callable[[str], bool]]] = {
    "heads": ("splash", (4, 256), "data=2,context=2,model=2", lambda told: False),
    "shards": ("splash", (4, 256), "fsdp=4,model=2", lambda told: False),
    "ring of kernels": ("splash", (1, 1024), "context=4,model=2", lambda told: not re.search("prefix|chunks", told)),
    "ring of blocks": ("blockwise", (2, 1024), "context=4,model=2", lambda told: True),
    "ring": ("ring", (2, 64), "data=2,context=4", lambda told: True),
}  # fmt: skip


@functools.cache
def as_written(name: str, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return numbers(shape, functools.partial(Masked, name), "gathered", layout="data")


@pytest.mark.parametrize(
    ("where", "name"),
    sampled(
        [*((where, name) for where in EVERYWHERE for name in masks.MASKS), *(("ring", name) for name in masks.BIASES)],
        [("ring of kernels", "causal documents")],
    ),
)
def test_a_step_has_the_numbers_of_every_mask_on_every_mesh(where: str, name: str) -> None:
    context, shape, mesh, is_ring = EVERYWHERE[where]
    may_see_none = name in ("padded documents", "padding, Flax", "padding of keys", "lengths", "heads")
    told = "" if name in masks.BIASES else masks.MASKS[name][1]
    in_ring = is_ring(told) and not (where == "ring of kernels" and may_see_none)
    asked: dict[str, Any] = {"mesh": mesh} | ({"layout": "ring"} if context == "ring" else {})
    actual = numbers(shape, functools.partial(Masked, name), context, in_ring=in_ring, **asked)
    expected = as_written(name, shape)
    assert actual.keys() == expected.keys() and len(actual) > 4
    for path, array in expected.items():
        size = np.abs(array).max()
        assert np.abs(actual[path] - array).max() <= (TOLERANCE * size if size > 1e-6 else 1e-6), path


@pytest.mark.parametrize("name", sampled(masks.MASKS, ["causal documents"]))
def test_a_compiled_step_has_no_array_of_queries_and_keys(name: str) -> None:
    """Without a kernel, as on CPUs, `flash` is in blocks of at most 512 keys."""
    program = masked_program(name, (2, 1024))
    found = {}
    for attention in ("plain", "flash"):
        plan = spanax.plan(program, spanax.cluster("cpu:2"), layout="data", attention=attention)
        text = spanax.start(program, plan).lower().compile().as_text()
        found[attention] = re.findall(r"\w+\[(?:\d+,)*1024,(?:\d+,)*1024(?:,\d+)*\]", text)
    assert plan.schedule.context == "blockwise" and "there is no attention kernel for cpu" in plan.why
    assert found["plain"] and not found["flash"]
