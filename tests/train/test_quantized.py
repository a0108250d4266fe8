"""Quantized training: the numbers of one device under every layout, its price, and what a run records."""

import functools
from pathlib import Path
from typing import Any

import jax
import pytest

import quantized
import spanax
from sampling import sampled
from spanax.errors import ConfigError, HardwareError, PlanMismatchError
from spanax.models.workloads import load
from spanax.plan.advice.summary import summarize
from spanax.plan.presets import PRESETS
from spanax.show.live.events import line
from spanax.show.search import search_json, search_text
from spanax.train.config import TrainConfig
from spanax.train.trainer import train

CELLS = [
    (table, layout, quantize)
    for table, (formats, _) in quantized.PARITY.items()
    for layout in quantized.MESHES
    for quantize in formats
]


@pytest.mark.parametrize(
    ("table", "layout", "quantize"),
    sampled(CELLS, [("parity", "tensor", "int8"), ("adapters", "fsdp+tensor", "nf4")]),
)
def test_a_quantized_step_equals_one_device(devices: Any, table: str, layout: str, quantize: str | None) -> None:
    _, recipe = quantized.PARITY[table]
    assert quantized.difference(layout, quantize, recipe) < 1e-6


def test_every_preset_has_a_row() -> None:
    """`ulysses` computes attention otherwise, in which no weight is quantized; `spatial` is for images."""
    assert quantized.MESHES.keys() >= PRESETS.keys() - {"ulysses", "spatial"}


def test_the_rates_of_quantized_matmuls_are_priced() -> None:
    program = load("llama-nano").trace(quantize="int8")
    found = spanax.search(program, spanax.cluster("v5e:4"), microbatches=1, remat=("none",))
    data, text = (show(summarize(found), 1) for show in (search_json, search_text))
    assert found.dtype == data["best"]["flop_dtype"] == "int8" and found.peak_flops == 394e12
    assert data["quantize"] == "int8" and data["quantized"][0] == "blocks.attention.q.kernel"
    assert "int8    matmuls of 7 weights: blocks.attention.q.kernel" in text and "394 TFLOP/s in int8" in text
    with pytest.raises(HardwareError, match="no rate of fp8") as error:
        spanax.plan(program.variant(quantize="fp8"), spanax.cluster("v5e:4"))
    assert "--quantize int8" in str(error.value)


def test_a_plan_is_of_its_quantization(tmp_path: Path) -> None:
    program = load("gpt-nano", batch_size=8).trace(quantize="fp8")
    plan = spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp")
    assert spanax.Plan.from_json(plan.to_json()) == plan and plan.schedule.quantize == "fp8"
    assert "matmuls in fp8" in str(plan.schedule)
    with pytest.raises(PlanMismatchError, match="quantize=None"):
        spanax.start(load("gpt-nano", batch_size=8).trace(), plan, devices=jax.devices())


def test_a_run_keeps_its_quantization(devices: Any, tmp_path: Path) -> None:
    events = list[dict[str, Any]]()
    options: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "global_batch_size": 8, "layout": "fsdp"}

    def run(**settings: Any) -> None:
        config = TrainConfig(**options, **settings)
        train(functools.partial(load, "gpt-nano"), config, devices, events.append)

    run(steps=1, quantize="int8")
    start = next(event for event in events if event["event"] == "start")
    assert len(start["quantized"]) == 4 and "int8: matmuls of blocks.attention.qkv.kernel, " in line(start)
    for other, says in ((None, "without --quantize"), ("fp8", "with fp8")):
        with pytest.raises(ConfigError, match=f"with quantize int8, and cannot be resumed {says}"):
            run(steps=2, quantize=other, resume=True)
