"""Plans that a search makes fit or faster without a request: their steps equal those of one device."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

import spanax
from spanax.models import gpt
from spanax.plan.cost.peak_memory import MARGIN_BYTES
from spanax.plan.plan import Plan
from spanax.trace.program import Program
from spanax.train.run import Run

STEPS = 3
REQUEST: dict[str, Any] = {"attention": "plain", "loss_chunks": 1}


def program(config: gpt.GPTConfig, batch_size: int) -> Program:
    tokens = {name: jax.ShapeDtypeStruct((batch_size, config.seq_len), "int32") for name in ("inputs", "targets")}
    return spanax.trace(
        build=functools.partial(gpt.GPT, config), optimizer=optax.sgd(0.1, momentum=0.9), batch=tokens, loss=gpt.loss,
        compute_dtype="float32",
    )  # fmt: skip


def trained(program: Program, plan: Plan) -> tuple[list[float], Run]:
    run, rng = spanax.start(program, plan, seed=3), np.random.default_rng(0)
    shape = program.batch[0].shape
    batches = [{name: rng.integers(0, 64, shape, np.int32) for name in ("inputs", "targets")} for _ in range(STEPS)]
    return [float(run.step(batch)["loss"]) for batch in batches], run


def assert_equals_one_device(program: Program, plan: Plan) -> None:
    losses, run = trained(program, plan)
    expected, single = trained(program, spanax.plan(program, spanax.cluster("cpu:1")))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path, array in single.arrays("param").items():
        np.testing.assert_allclose(run.arrays("param")[path], array, rtol=1e-5, atol=1e-5, err_msg=path)


def test_an_automatically_padded_plan_equals_one_device() -> None:
    uneven = program(gpt.GPTConfig(64, seq_len=1024, num_layers=1, num_heads=3, embed_dim=192), 2)
    plan = spanax.plan(uneven, spanax.cluster("v5e:2x4"), forbid=["seq", "head_dim", "embed"], **REQUEST)
    assert plan.schedule.padded == (("heads", 4),) and "heads padded: a step takes" in plan.why
    assert_equals_one_device(uneven, plan)


def test_an_automatically_offloaded_plan_equals_one_device() -> None:
    even = program(gpt.GPTConfig(64, seq_len=32, num_layers=2, num_heads=4, embed_dim=64), 8)
    plan = spanax.plan(even, replace(spanax.cluster("h100:4"), memory_bytes=MARGIN_BYTES + (747 << 10)), **REQUEST)
    assert plan.schedule.offload == ("optimizer",) and "the optimizer's state in host memory" in plan.why
    assert_equals_one_device(even, plan)
