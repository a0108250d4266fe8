"""Adapters: what a layer computes, what is trained, and the same numbers under every layout."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.adapters.lora import Dims, LoRA, adapter_paths, lora, packed_paths
from spanax.errors import SpanaxError
from spanax.models import gpt, llama
from spanax.plan.evaluate import model_flops

LAYERS: dict[str, tuple[Callable[[nnx.Rngs], Any], tuple[int, ...]]] = {
    "linear": (lambda rngs: nnx.Linear(8, 6, rngs=rngs), (2, 3, 8)),
    "heads": (lambda rngs: nnx.LinearGeneral(8, (2, 3), rngs=rngs), (2, 8)),
    "of heads": (lambda rngs: nnx.LinearGeneral((2, 4), 6, axis=(-2, -1), rngs=rngs), (5, 2, 4)),
    "an inner dim": (lambda rngs: nnx.LinearGeneral(8, 6, axis=1, use_bias=False, rngs=rngs), (2, 8, 3)),
    "a batch of kernels": (lambda rngs: nnx.LinearGeneral(8, 6, batch_axis={0: 3}, rngs=rngs), (3, 2, 8)),
    "einsum": (lambda rngs: nnx.Einsum("nta,hab->nthb", (4, 8, 3), (4, 3), rngs=rngs), (2, 5, 8)),
    "experts": (lambda rngs: nnx.Einsum("ebd,edf->ebf", (3, 8, 6), rngs=rngs), (3, 2, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_adapter_is_an_update_of_the_kernel(name: str) -> None:
    build, shape = LAYERS[name]
    layer = build(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), shape)
    adapted = lora(nnx.Sequential(layer), 3, alpha=12.0, rngs=nnx.Rngs(1)).layers[0]
    np.testing.assert_array_equal(adapted(x), layer(x))
    adapted.lora_b[...] = jax.random.normal(jax.random.key(2), adapted.lora_b.shape)
    dims = Dims.of(layer, x.ndim)
    update = jnp.einsum(f"{dims.a},{dims.b}->{dims.kernel}", adapted.lora_a[...], adapted.lora_b[...])
    layer.kernel[...] += 4.0 * update
    np.testing.assert_allclose(adapted(x), layer(x), atol=1e-5)


def test_paths_remain_and_layers_that_repeat_are_adapted() -> None:
    model = llama.Llama(llama.SIZES["nano"], nnx.Rngs(0))
    adapted = lora(model, 4, rngs=nnx.Rngs(1), quantize="nf4", dtype="bfloat16")
    before, after = (
        {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(m))} for m in (model, adapted)
    )
    layers = [f"blocks.{name}" for name in ("attention.k", "attention.out", "attention.q", "attention.v")]
    layers += [f"blocks.mlp.{name}" for name in ("down", "gate", "up")]
    assert after - before == {f"{name}.{part}" for name in layers for part in ("lora_a", "lora_b")}
    assert dict(packed_paths(adapted)).keys() == {f"{name}.kernel" for name in layers}
    assert adapted.embed.dtype == adapted.head.kernel.dtype == jnp.bfloat16
    assert adapted.blocks.mlp.up.lora_a.dtype == jnp.float32 and model.embed.dtype == jnp.float32


class Experts(nnx.Module):
    """Weights of experts that no linear layer has, beside a layer that is not repeated."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, 64, 32)))
        self.bias = nnx.Param(jnp.zeros((4, 64, 64)))
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.einsum("bd,edf->bf", x, self.up[...]) + self.bias[0, 0, :32])


def test_other_weights_are_packed_too() -> None:
    adapted = lora(Experts(nnx.Rngs(0)), 2, rngs=nnx.Rngs(1), quantize="int8")
    assert dict(packed_paths(adapted)).keys() == {"up", "head.kernel"}
    x = jnp.ones((2, 64))
    np.testing.assert_allclose(adapted(x), Experts(nnx.Rngs(0))(x), rtol=0.1, atol=0.5)


REFUSED: dict[str, Callable[[], Any]] = {
    "a pattern": lambda: lora(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0), modules=["q"]),
    "no layer": lambda: lora(nnx.Conv(2, 2, (3,), rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0)),
    "twice": lambda: lora(lora(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0)),
    "nothing to pack": lambda: lora(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0), quantize="nf4"),
    "a format": lambda: lora(nnx.Linear(64, 6, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0), quantize="nf3"),
    "no rank": lambda: LoRA.parse("alpha=3"),
    "half a rank": lambda: LoRA.parse("rank=2.5"),
    "no number": lambda: LoRA.parse("rank=16,alpha=x"),
    "two ranks": lambda: LoRA.parse("rank=16,8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adapted(name: str) -> None:
    with pytest.raises(SpanaxError) as raised:
        REFUSED[name]()
    assert "fix: " in str(raised.value)


def program(quantize: str | None, model: Any = llama.Llama, size: Any = llama.SIZES["nano"]) -> spanax.Program:
    workload = spanax.Workload(
        build=partial(model, size),
        batch=gpt.example_batch(8, 16),
        loss=gpt.loss,
        optimizer=optax.adamw(1e-2),
    )
    return workload.adapted(LoRA(4, 8.0), quantize=quantize).trace()


def test_a_step_returns_frozen_weights_as_they_are() -> None:
    """In a scan over layers with a remat, as a weight that is written would be stacked anew; MFU counts no gradient."""
    traced = program("nf4", size=replace(llama.SIZES["nano"], remat=True))
    body = traced.step.graph.body
    changed = {leaf.path for leaf, a, b in zip(traced.leaves, body.inputs, body.outputs, strict=False) if a != b}
    assert {path for path in changed if "optimizer" not in path} == set(adapter_paths(adapted_model()))
    assert model_flops(traced) < 2.3 * traced.step.active.flops


def adapted_model() -> nnx.Module:
    return lora(llama.Llama(llama.SIZES["nano"], nnx.Rngs(0)), 4, rngs=nnx.Rngs(0))


def test_frozen_weights_have_no_optimizer_state_and_are_gathered_in_their_bytes() -> None:
    """Twice, forward and backward: the backward pass unpacks the weights again."""
    traced = program("nf4").variant(remat="full")
    machine = spanax.cluster("cpu:8")
    plan = spanax.plan(traced, machine, layout="fsdp")
    adapters = {leaf.path for leaf in plan.leaves if leaf.kind == "param" and "lora_" in leaf.path}
    trained = {leaf.path.partition(".mu.")[2] for leaf in plan.leaves if ".mu." in leaf.path}
    assert trained == adapters and len(adapters) == 14
    codes = sum(math.prod(leaf.shape) for leaf in plan.leaves if leaf.path.endswith("codes"))
    report = spanax.check(traced, plan, machine)
    gathered = [
        each
        for each in report.collectives
        if each.kind == "all-gather" and each.dtype == "s32" and each.bytes_once > 1024
    ]
    assert sum(each.bytes_once * each.runs for each in gathered) == 2 * 4 * codes
    assert report.compiled.collectives == report.predicted.collectives
