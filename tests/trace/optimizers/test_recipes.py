"""Recipes: an optimizer by name, its schedule, weight decay, clipping and averaging."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import spanax
from sampling import sampled
from spanax.errors import ConfigError, SpanaxError
from spanax.interop.adapter import FILE
from spanax.interop.hf_export import export_weights
from spanax.interop.safetensors import tensors
from spanax.models.workloads import load
from spanax.trace.optimizers.named import scheduled
from spanax.trace.optimizers.recipe import OPTIMIZERS, Recipe
from spanax.train.config import TrainConfig
from spanax.train.record.folder import recorded
from spanax.train.state.weights import Source, dtype_shape
from spanax.train.trainer import train

pytestmark = pytest.mark.usefixtures("devices")  # they compare values

ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
LINEAR = spanax.Workload(
    build=lambda rngs: nnx.Linear(8, 4, use_bias=False, rngs=rngs),
    batch={"x": jax.ShapeDtypeStruct((16, 8), "float32")},
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    source=[{"x": row} for row in np.tile(ROWS, (2, 1))],
    validation=[{"x": row} for row in ROWS],
)


def gpt() -> spanax.Workload:
    workload: spanax.Workload = load("gpt-nano", batch_size=16, seq_len=32, num_layers=2)
    return workload


def traced(workload: spanax.Workload, recipe: Recipe) -> spanax.Program:
    return workload.trace(learning_rate=1e-3, num_steps=8, recipe=recipe)


def started(program: spanax.Program, mesh: str = "data=1") -> spanax.Run:
    size = spanax.MeshShape.of(mesh).size
    return spanax.start(program, spanax.plan(program, spanax.cluster(f"cpu:{size}"), mesh=mesh), seed=0)


@pytest.mark.parametrize("optimizer", sampled(OPTIMIZERS, ["adafactor", "muon"]))
def test_each_optimizer_trains_sharded_as_on_one_device(optimizer: str) -> None:
    recipe = Recipe(optimizer, "linear", 2, weight_decay=0.05, max_grad_norm=0.5, ema=0.9)
    tokens = np.random.default_rng(0).integers(0, 256, size=(16, 33)).astype("int32")
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    program, results = traced(gpt(), recipe), []
    for mesh in ("data=1", "fsdp=8"):
        run = started(program, mesh)
        losses = [float(run.step(batch)["loss"]) for _ in range(4)]
        results.append([*losses, float(run.evaluate(batch)["loss"])])
        sharded = [leaf for leaf in run.program.leaves if leaf.kind == "optimizer" and leaf.num_bytes > 1 << 14]
        assert mesh == "data=1" or all(
            np.prod(run.arrays()[leaf.path].sharding.shard_shape(leaf.shape)) * 8 == np.prod(leaf.shape)
            for leaf in sharded
        )
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)
    assert results[0][-2] < results[0][0]


def test_muon_orthogonalizes_the_matrices_of_each_layer() -> None:
    program = traced(gpt(), Recipe("muon"))
    paths = {leaf.path.partition(".mu.")[2] for leaf in program.leaves if ".muon." in leaf.path}
    assert paths - {""} == {f"blocks.{name}.kernel" for name in ("attention.qkv", "attention.out", "up", "down")}


def written(program: spanax.Program) -> list[Any]:
    """The step as text, without the callers of its operations, which fill a thousand times the room."""
    body = program.step.graph.body
    ops = [(op.name, op.inputs, op.outputs, str(op.eqn)) for op in program.step.graph.ops()]
    return [body.inputs, body.outputs, *ops]


def test_the_default_is_adamw_of_every_text_workload() -> None:
    first, second = (traced(gpt(), Recipe(name)) for name in (None, "adamw"))
    assert first.fingerprint == second.fingerprint
    assert written(first) == written(second)


@pytest.mark.parametrize(("kind", "rates"), [("cosine", (1.0, 0.1)), ("linear", (1.0, 0.0)), ("constant", (1.0, 1.0))])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedules(kind: str, rates: tuple[float, float], warmup: int) -> None:
    schedule = scheduled(1.0, 10, warmup, kind=kind, end=0.1)
    np.testing.assert_allclose([schedule(warmup), schedule(10)], rates, atol=1e-6)
    assert warmup == 0 or float(schedule(0)) == 0


def test_evaluations_use_the_average() -> None:
    run = started(traced(LINEAR, Recipe("sgd", "constant", 0, ema=0.5)))
    average = np.array(run.params()["kernel"])
    for step in range(6):
        run.step({"x": ROWS})
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * np.array(run.params()["kernel"])
    expected = np.square(ROWS @ average).mean()
    assert float(run.evaluate({"x": ROWS})["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(run.evaluate({"x": ROWS[:4]})["loss"]) == pytest.approx(np.square(ROWS[:4] @ average).mean(), rel=1e-5)


def test_an_optimizer_without_the_option_is_refused() -> None:
    own = spanax.Workload(build=LINEAR.build, batch=LINEAR.batch, loss=LINEAR.loss, optimizer=optax.sgd(0.1))
    of_model = spanax.Workload(
        build=LINEAR.build,
        batch=LINEAR.batch,
        loss=LINEAR.loss,
        optimizer=lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param),
    )
    for workload, recipe, says in (
        (own, Recipe(schedule="linear"), "takes no --schedule"),
        (of_model, Recipe(ema=0.9), "is a function of the model"),
        (own, Recipe("adam"), "did you mean 'adamw'"),
    ):
        with pytest.raises(SpanaxError, match=says):
            workload.trace(learning_rate=0.1, num_steps=4, recipe=recipe)
    own.trace(learning_rate=0.1, num_steps=4, recipe=Recipe("lion", ema=0.9))


def trained(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    config = TrainConfig(workload="mine", mesh="fsdp=2", output_dir=str(folder), **settings)
    train(lambda **_: LINEAR, config, jax.devices()[:2], events.append)
    return events


def test_a_resumed_run_continues_with_its_recipe(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"optimizer": "lion", "ema": 0.9, "schedule": "constant", "warmup_steps": 1}
    whole = trained(tmp_path / "whole", steps=4, **recipe)
    trained(tmp_path / "parts", steps=2, **recipe)
    assert recorded(tmp_path / "parts").items() >= recipe.items()
    rest = trained(tmp_path / "parts", steps=4, resume=True, **recipe)
    assert rest[-1]["val_loss"] == pytest.approx(whole[-1]["val_loss"], rel=1e-6)
    for changed, says in (
        ({"optimizer": "sgd"}, "was started with optimizer lion, and cannot be resumed with sgd"),
        ({"ema": None}, "was started with ema 0.9"),
    ):
        with pytest.raises(ConfigError, match=says):
            trained(tmp_path / "parts", steps=6, resume=True, **(recipe | changed))
    trained(tmp_path / "plain", steps=2)
    with pytest.raises(ConfigError, match="was started without --ema"):
        trained(tmp_path / "plain", steps=4, resume=True, ema=0.9)
    trained(tmp_path / "plain", steps=4, resume=True, schedule="linear", weight_decay=0.0, max_grad_norm=1.0)


def test_epochs_are_steps_over_the_data(tmp_path: Path) -> None:
    events = trained(tmp_path / "run", num_epochs=3)  # 32 examples in batches of 16
    assert events[-1]["steps"] == 6 and recorded(tmp_path / "run")["num_epochs"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, "rank=2,modules=out"])
def test_an_export_has_the_average(lora: str | None, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"global_batch_size": 8, "seq_len": 16, "learning_rate": 0.1, "layout": "fsdp"}
    plain = TrainConfig(workload="gpt-nano", steps=3, ema=0.9, output_dir=str(tmp_path / "run"), **sizes)
    base = replace(plain, output_dir=str(tmp_path / "base"))
    adapted = replace(plain, lora=lora, init=base.output_dir)
    for config in (plain,) if lora is None else (base, adapted):
        train(partial(load, "gpt-nano"), config, jax.devices(), lambda event: None)
    result = export_weights(tmp_path / "run", "gpt2", tmp_path / "out")
    assert result.is_averaged and "averaged" in str(result)
    saved = Source.of(tmp_path / "run")
    name = "embed" if lora is None else "blocks.attention.out.lora_b"
    average, last = saved.averages[name], saved.saved[name]
    shape = dtype_shape(last)[1]
    values = saved.read({path: np.broadcast_to(np.zeros((), "float32"), shape) for path in (average, name)})
    assert not np.array_equal(values[average], values[name])
    if lora is None:
        np.testing.assert_array_equal(tensors(tmp_path / "out")["transformer.wte.weight"].read(), values[average])
        return
    written = load_file(tmp_path / "out" / FILE)["base_model.model.transformer.h.1.attn.c_proj.lora_B.weight"]
    np.testing.assert_array_equal(written, values[average][1].T)
    merged = export_weights(tmp_path / "run", "gpt2", tmp_path / "merged", merge=True)
    assert merged.is_averaged
    a, b, kernel = (saved.part(f"blocks.attention.out.{part}").make()[1] for part in ("lora_a", "lora_b", "kernel"))
    update = np.tensordot(a, values[average][1], 1) * 2.0  # alpha is twice the rank
    exported = tensors(tmp_path / "merged")["transformer.h.1.attn.c_proj.weight"].read()
    np.testing.assert_allclose(exported, (kernel + update).reshape(exported.shape), atol=1e-6)
