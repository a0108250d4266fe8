"""Kernels: an attention that a platform's kernel computes has the numbers of the one that the model wrote."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spanax
from sampling import sampled
from spanax.models.workloads import load
from spanax.step.attention import kernels
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.attention.operation import BACKWARD, FORWARD, attention_grad_p, attention_p
from spanax.trace.variant import Variant

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

    def forward(q: Any, k: Any, v: Any, *, form: Any, dtype: Any, kernel: Any) -> Any:
        asked.append(FORWARD)
        return kernels.splash_forward(kernel, form, dtype, q, k, v, interpret=True)

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


@pytest.mark.slow
def test_a_step_with_a_kernel_equals_the_model_on_every_mesh() -> None:
    workload = load("llama-nano", batch_size=8, seq_len=128, num_layers=1)
    program = workload.trace(learning_rate=1e-3, num_steps=4)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 60, leaf.shape, dtype=np.int32) for name, leaf in workload.batch.items()}

    def numbers(context: str, **asked: Any) -> list[float]:
        variant = program.variant(Variant(context=context))
        run = spanax.start(program, spanax.plan(variant, spanax.cluster("cpu:8"), **asked))
        assert run.plan.schedule.context == context
        metrics = run.step(batch)
        return [float(metrics["loss"]), float(metrics["grad_norm"])]

    expected = pytest.approx(numbers("gathered", layout="data"), rel=1e-5)
    # Heads are split over model, the batch over fsdp; of a split sequence a kernel has all on every device.
    assert numbers("splash", layout="fsdp+tensor", mesh="fsdp=4,model=2") == expected
    assert numbers("splash", layout="context", mesh="data=4,context=2") == expected
