"""Logits in chunks, run: the numbers are those of one device with one chunk, and the logits are not there."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hlo_bytes
import spanax
from spanax.errors import SpanaxError
from spanax.models import gpt
from spanax.plan.candidates.loss_chunks import saved_bytes, search_in_chunks, suiting_chunks
from spanax.plan.evaluate import evaluate
from spanax.plan.place import as_planned
from spanax.plan.plan import Plan, Schedule
from spanax.stack.stack import Stack
from spanax.trace.program import Program
from spanax.train.run import Run

ROWS, LENGTH, WIDTH, VOCAB = 16, 32, 16, 512
LOGIT_BYTES = 4 * ROWS * LENGTH * VOCAB
BATCH = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), "int32") for name in ("inputs", "targets")}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x - x.mean(1, keepdims=True))))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table, self.blocks = nnx.Embed(VOCAB, WIDTH, rngs=rngs), Stack(Block, 2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.blocks(self.table(tokens)))


def loss(model: Net, batch: dict[str, jax.Array]) -> Any:
    logits, targets = model(batch["inputs"]), batch["targets"]
    lost = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    real = targets > 7
    return (lost * real).sum() / real.sum(), {"right": (logits.argmax(-1) == targets).mean()}


@functools.cache
def program(microbatches: int = 1) -> Program:
    build = lambda rngs: Net(rngs)  # noqa: E731
    optimizer = optax.sgd(0.3, momentum=0.9)
    return spanax.trace(build=build, optimizer=optimizer, batch=BATCH, loss=loss, microbatches=microbatches)


def planned(layout: str, mesh: str, chunks: int | str, microbatches: int = 1) -> Plan:
    machine = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    schedule = Schedule(microbatches=microbatches)
    traced = program(microbatches)
    return spanax.plan(traced, machine, layout=layout, mesh=mesh, schedule=schedule, loss_chunks=chunks)


def trained(plan: Plan) -> dict[str, np.ndarray]:
    run, random = spanax.start(program(plan.schedule.microbatches), plan, seed=3), np.random.default_rng(0)
    steps = []
    for _ in range(2):
        batch = {name: random.integers(0, VOCAB, (ROWS, LENGTH)).astype("int32") for name in BATCH}
        steps.append({name: np.asarray(value) for name, value in run.step(batch).items()})
    metrics = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
    return metrics | {path: np.asarray(array) for path, array in run.params().items()}


@functools.cache
def whole_on_one_device(microbatches: int) -> dict[str, np.ndarray]:
    return trained(planned("data", "data=1", 1, microbatches))


def compiled(plan: Plan) -> Any:
    traced = as_planned(program(plan.schedule.microbatches), plan)
    return Run(traced, plan, plan.mesh.build(), state=[]).lower().compile()


@pytest.mark.parametrize(
    ("layout", "mesh", "microbatches"),
    [
        pytest.param("data", "data=8", 1, marks=pytest.mark.slow),
        ("fsdp", "fsdp=8", 2),
        pytest.param("context", "data=2,context=4", 1, marks=pytest.mark.slow),
        pytest.param("pipeline", "pipe=2,data=2", 4, marks=pytest.mark.slow),
        pytest.param("fsdp+tensor+seq", "fsdp=4,model=2", 2, marks=pytest.mark.slow),
    ],
)
def test_chunked_losses_equal_one_device_without_chunks(layout: str, mesh: str, microbatches: int) -> None:
    result, expected = trained(planned(layout, mesh, 8, microbatches)), whole_on_one_device(microbatches)
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(result[name], array, rtol=0, atol=1e-5 * abs(array).max(), err_msg=name)


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [("fsdp", "fsdp=4"), pytest.param("data", "data=4", marks=pytest.mark.slow)],
)
def test_loss_chunks_add_no_communication_and_store_no_logits(layout: str, mesh: str) -> None:
    plans = [planned(layout, mesh, chunks) for chunks in (1, 8)]
    steps = [compiled(plan) for plan in plans]
    moved = [hlo_bytes.by_axis(step.as_text(), dict(plans[0].mesh.axes)) for step in steps]
    assert sum(moved[1].values()) <= sum(moved[0].values()) + 256
    foreseen = [evaluate(program(), plan, spanax.cluster("a100:4")).prediction for plan in plans]
    for whole, chunked in zip(
        *(prediction.moved[mesh.split("=")[0]].values() for prediction in foreseen if prediction), strict=True
    ):
        assert chunked <= whole + 256
    machine = spanax.cluster("cpu", 4)
    reported = [evaluate(program(), plan, machine).peak_bytes for plan in plans]
    held = [step.memory_analysis().temp_size_in_bytes for step in steps]
    weight_bytes = 4 * VOCAB * WIDTH  # the gradient of the head is added up, and of each chunk there is one more
    least = LOGIT_BYTES // 4 * 7 // 8 - 2 * weight_bytes
    assert reported[0] - reported[1] >= least and held[0] - held[1] >= least
    assert saved_bytes(program(), plans[1], machine) == round(reported[0] - reported[1])


@functools.cache
def small_gpt() -> Program:
    config = gpt.GPTConfig(vocab_size=50257, seq_len=256, num_layers=2, num_heads=4, embed_dim=256)
    build = lambda rngs: gpt.GPT(config, rngs)  # noqa: E731
    batch = gpt.example_batch(64, 256)  # 4,096 tokens a device
    return spanax.trace(build=build, optimizer=optax.adamw(1e-3), batch=batch, loss=gpt.loss)


def test_auto_chunks_if_memory_is_short() -> None:
    traced = small_gpt()
    machine = spanax.cluster("cpu:4")
    roomy = spanax.plan(traced, machine, layout="data", loss_chunks="auto")
    assert roomy.schedule.loss_chunks == 1 and "logits in one chunk: more chunks save memory" in roomy.why
    upper = evaluate(traced, roomy, machine).candidate.upper_bytes
    tight = dataclasses.replace(machine, memory_bytes=0.7 * upper)
    plan = spanax.plan(traced, tight, layout="data", loss_chunks="auto")
    count = plan.schedule.loss_chunks
    assert count > 1 and f"logits in {count} chunks" in plan.why
    assert evaluate(traced.variant(loss_chunks=count), plan, tight).candidate.upper_bytes <= tight.memory_bytes
    assert Plan.from_json(plan.to_json()) == plan
    assert "loss_chunks" not in planned("data", "data=4", 1).to_json()
    # If it does not fit, more chunks are used at any cost.
    tighter = dataclasses.replace(machine, memory_bytes=0.9 * evaluate(traced, plan, tight).candidate.peak_bytes)
    assert suiting_chunks(traced, roomy, tighter)[0] > count


def test_few_tokens_are_not_divided_where_they_fit() -> None:
    plan = planned("data", "data=4", 1)  # 64 tokens a device
    count, reason = suiting_chunks(program(), plan, spanax.cluster("cpu:4"))
    assert count == 1 and re.fullmatch(r"logits in one chunk: 2 chunks take \d+% longer", str(reason))


def test_a_search_chunks_only_where_that_makes_a_faster_layout_fit() -> None:
    traced = small_gpt()
    machine = spanax.cluster("h100:4")
    find = functools.partial(spanax.search, mesh="data=4", pipeline=False, remat=("none",), microbatches=1)
    fitting = search_in_chunks(lambda form: find(form, machine), traced, machine)
    assert fitting.best is not None and fitting.program_of(fitting.best).loss_chunks == 1
    tight = dataclasses.replace(machine, memory_bytes=0.7 * fitting.best.upper_bytes)
    assert find(traced, tight).best is None
    chunked = search_in_chunks(lambda form: find(form, tight), traced, tight)
    assert chunked.best is not None and chunked.program_of(chunked.best).loss_chunks > 1


def test_an_invalid_number_of_chunks_raises() -> None:
    with pytest.raises(SpanaxError, match="5 chunks do not divide the 32 tokens of a row"):
        planned("data", "data=4", 5)
    with pytest.raises(SpanaxError, match="loss chunks are 'some'"):
        planned("data", "data=4", "some")


def test_loss_chunks_of_a_custom_step_raise() -> None:
    def train_step(model: Net, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        (value, _), grads = nnx.value_and_grad(loss, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return {"loss": value}

    traced = spanax.trace(build=lambda rngs: Net(rngs), optimizer=optax.sgd(0.5), batch=BATCH, train_step=train_step)
    with pytest.raises(SpanaxError, match="`loss_chunks` requires `loss`"):
        spanax.plan(traced, spanax.cluster("cpu:4"), layout="data", loss_chunks=4)
