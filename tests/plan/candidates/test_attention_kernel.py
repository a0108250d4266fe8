"""Attention: whether a plan has it by a kernel, what it then holds, and the reason where it does not."""

import functools

import jax
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import SpanaxError
from spanax.models.workloads import load
from spanax.plan.advice.summary import summarize
from spanax.plan.plan import Plan
from spanax.show.search import search_json, search_text
from spanax.trace.program import Program


@functools.cache
def program(dtype: str | None = "bfloat16", seq_len: int = 512) -> Program:
    workload = load("llama-nano", batch_size=8, seq_len=seq_len, num_layers=1)
    return workload.trace(learning_rate=1e-3, num_steps=4, compute_dtype=dtype)


def test_a_plan_records_its_attention_kernel() -> None:
    actual = spanax.plan(program(), spanax.cluster("h100:8"), layout="fsdp", attention="flash")
    assert actual.schedule.context == "cudnn" and actual.why.endswith("; attention cudnn for 512 x 512 causal")
    assert Plan.from_json(actual.to_json()) == actual
    assert spanax.plan(program(), spanax.cluster("v5p:2x2x2"), layout="fsdp", attention="auto").schedule.context == (
        "splash"
    )


def test_by_default_accelerators_use_a_kernel_and_cpus_compute_as_the_model_does() -> None:
    for asked, on, context in ((None, "h100:8", "cudnn"), ("plain", "h100:8", "gathered"), (None, "cpu:8", "gathered")):
        actual = spanax.plan(program(), spanax.cluster(on), layout="fsdp", attention=asked)
        assert actual.schedule.context == context and ("attention" in actual.why) == (context == "cudnn")


@pytest.mark.parametrize(
    ("cluster", "dtype", "why"),
    [
        ("cpu:8", "bfloat16", "plain: there is no attention kernel for cpu"),
        ("mi300x:8", "bfloat16", "plain: there is no attention kernel for mi300x"),
        ("h100:8", "float32", "float32, where cudnn supports float16 or bfloat16"),
    ],
)
def test_without_a_kernel_the_plan_states_why_and_flash_raises(cluster: str, dtype: str | None, why: str) -> None:
    actual = spanax.plan(program(dtype), spanax.cluster(cluster), layout="fsdp", attention="auto")
    assert actual.schedule.context == "gathered" and why in actual.why
    with pytest.raises(SpanaxError, match="no attention of this program is supported by a kernel") as error:
        spanax.plan(program(dtype), spanax.cluster(cluster), layout="fsdp", attention="flash")
    assert why in str(error.value)


@pytest.mark.parametrize("chunks", [4, "auto"])
@pytest.mark.parametrize(("cluster", "context"), [("cpu:8", "gathered"), ("h100:8", "cudnn")])
def test_the_plan_states_why_attention_stays_plain_with_loss_chunks(
    cluster: str, context: str, chunks: int | str
) -> None:
    actual = spanax.plan(program(), cluster, layout="fsdp", attention="auto", loss_chunks=chunks)
    error = "attention plain: there is no" if context == "gathered" else "attention cudnn for 512 x 512 causal"
    assert actual.schedule.context == context and error in actual.why
    assert actual.schedule.loss_chunks == 4 or "logits" in actual.why


def test_a_custom_train_step_is_unchanged() -> None:
    actual = spanax.trace(
        build=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        train_step=lambda model, optimizer, x: {"loss": model(x).mean()},
    )
    error = spanax.plan(actual, spanax.cluster("h100:8"), layout="data", attention="auto").why
    assert error.startswith("as requested; ") and error.endswith(
        "; attention plain: the program has a custom train step"
    )


def test_a_kernel_stores_no_scores_and_counts_its_flops() -> None:
    each, two = (
        spanax.search(program(seq_len=2048), spanax.cluster("v5p:2x2x2"), layout="fsdp", remat=("none",),
                      microbatches=1, attention=asked)
        for asked in ("plain", "flash")
    )  # fmt: skip
    plain, flash = each.best, two.best
    assert plain is not None and flash is not None
    scores = 4 * 2048**2  # of one example and head, in 32 bits
    assert plain.memory["activations"] - flash.memory["activations"] > scores
    assert flash.step_seconds < plain.step_seconds and each.model_flops == two.model_flops
    # With a causal mask, 10 of 16 blocks are computed; the backward pass recomputes the scores.
    heads, width = 8 * 8, 16
    assert plain.flops - flash.flops == pytest.approx((6 - 7 * 10 / 16) * 2 * 2048**2 * width * heads / 8, rel=1e-6)


def test_a_search_is_summarized_in_one_line() -> None:
    result = spanax.search(program(), spanax.cluster("h100:8"), layout="fsdp", attention="auto")
    summary = summarize(result)
    assert search_json(summary, 1)["attention"] == ["cudnn for 512 x 512 causal"]
    assert "  attention cudnn for 512 x 512 causal" in search_text(summary, 1)


def test_a_search_has_the_clusters_default_attention() -> None:
    workload = load("llama3-8b", batch_size=8, seq_len=512, num_layers=2)
    program = workload.trace(learning_rate=1e-3, num_steps=4, compute_dtype="bfloat16")
    kernels = {}
    for attention in (None, "auto", "plain"):
        result = spanax.search(program, "h100:8", layout="fsdp", attention=attention, top=1)
        kernels[attention] = {each.kernel for each in result.attention}
    assert kernels == {None: {"cudnn"}, "auto": {"cudnn"}, "plain": set()}
