"""The state of an optimizer in bfloat16: half the bytes, as planned, and nearly the same course."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spanax
import zoo
from spanax.errors import SpanaxError
from spanax.models.unet import adam
from spanax.trace.optimizers.named import adamw, lion, muon, sgd
from spanax.trace.optimizers.wrapped import stored_as
from spanax.train.run import Run

MLP = spanax.Workload(build=zoo.MLP, batch=zoo.VECTORS(32), loss=zoo.squared_error)


def traced(state: str | None = None, workload: spanax.Workload = MLP) -> spanax.Program:
    return workload.trace(learning_rate=3e-3, num_steps=40, optimizer_state=state)


def planned(program: spanax.Program) -> spanax.Plan:
    return spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp", mesh="fsdp=8")


def test_bfloat16_moments_halve_the_bytes_of_plan_and_compiled_step() -> None:
    whole, half = planned(traced("float32")), planned(program := traced("bfloat16"))
    moments = sum(leaf.local_bytes for leaf in whole.leaves if leaf.kind == "optimizer" and leaf.shape)
    assert moments > 8_000
    assert whole.state_bytes("optimizer") - half.state_bytes("optimizer") == moments // 2
    assert whole.state_bytes("param") == half.state_bytes("param")
    batch = sum(leaf.local_bytes for leaf in half.batch)
    memory = Run(program, half, half.mesh.build(), state=[]).compile().memory_analysis()
    assert memory.argument_size_in_bytes == half.state_bytes() + batch


@pytest.mark.slow
def test_bfloat16_moments_train_nearly_like_float32() -> None:
    losses = {}
    for state in ("float32", "bfloat16"):
        program = traced(state)
        run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:1"), layout="data"), seed=0)
        losses[state] = [float(run.step(MLP.batch)["loss"]) for _ in range(40)]
    assert losses["float32"][-1] < 0.6 * losses["float32"][0]
    assert losses["bfloat16"] != losses["float32"]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)


def test_only_short_means_of_moments_decay_in_bfloat16() -> None:
    """Why Adam with its usual `b2` keeps its second moment in float32."""

    def second_moment(b2: float) -> float:
        optimizer, params = stored_as("bfloat16", optax.adam(1e-3, b2=b2)), {"w": jnp.ones(8)}
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for step in range(100):
            state = update({"w": jnp.full(8, float(step < 10))}, state)[1]
        return float(state[0].nu["w"][0])

    assert second_moment(0.95) < 0.01
    assert second_moment(0.999) == pytest.approx(0.01, rel=0.05)  # 0.9 of it in float32


MOMENTS = [
    (adamw, {"mu", "nu"}),
    (sgd, {"trace"}),
    (adam, {"mu"}),
    (lion, {"mu"}),
    (partial(muon, axes={"w": ("embed", "mlp")}), {"mu"}),
]


@pytest.mark.parametrize(("optimizer", "in_bfloat16"), MOMENTS)
def test_moments_in_bfloat16_by_optimizer(optimizer, in_bfloat16) -> None:
    state = optimizer(1e-3, 100, state_dtype="bfloat16").init({"w": jnp.ones((4, 4))})
    result = jax.tree_util.tree_flatten_with_path(state)[0]
    half = {path for path, leaf in result if leaf.dtype == jnp.bfloat16}
    assert {name for name in ("mu", "nu", "trace") for path in half if f".{name}" in jax.tree_util.keystr(path)} == (
        in_bfloat16
    )


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-3), lambda rate, steps: optax.sgd(rate)])
def test_a_custom_optimizer_is_unchanged(optimizer) -> None:
    local = partial(
        traced, workload=spanax.Workload(build=zoo.MLP, batch=MLP.batch, loss=MLP.loss, optimizer=optimizer)
    )
    assert local().fingerprint == local("float32").fingerprint
    with pytest.raises(SpanaxError, match="optimizer cannot store its state in bfloat16"):
        local("bfloat16")
    with pytest.raises(SpanaxError, match="unknown optimizer state 'int8'"):
        local("int8")
