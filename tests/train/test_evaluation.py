"""Evaluation: every metric of a loss, averaged over all validation examples, also of a smaller last batch."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from programs import Net
from sampling import sampled
from spanax.check.measure.run_record import run_record
from spanax.show.live.events import line
from spanax.show.page.document import document
from spanax.show.page.run import run_page
from spanax.show.report import report_text
from spanax.train.config import TrainConfig
from spanax.train.record.metric_curves import metric_curves
from spanax.train.record.report import run_report
from spanax.train.trainer import train

BATCH = {name: jax.ShapeDtypeStruct((16, 8), "float32") for name in ("x", "y")}


def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
    error = jnp.abs(model(batch["x"]) - batch["y"])
    metrics = {"error": {"mean": error.mean(), "by_dim": error.mean(0)}, "close": (error < 1).mean()}
    return jnp.square(error).mean(), metrics


def examples(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [{name: random.normal(size=8).astype("float32") for name in BATCH} for _ in range(count)]


class Blocks(nnx.Module):
    """Equal layers, which the stages of a pipeline share."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = spanax.Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(x)


Event = dict[str, Any]


def trained(folder: Path, validation: Any, mesh: str = "data=2", build: Any = Net, **settings: Any) -> list[Event]:
    workload = spanax.Workload(
        build=build, batch=BATCH, loss=loss, optimizer=optax.sgd(0.1), source=examples(64), validation=validation,
        microbatches=2 if "pipe" in mesh else 1,
    )  # fmt: skip
    reported: list[dict[str, Any]] = []
    config = TrainConfig(workload="mine", mesh=mesh, steps=2, output_dir=str(folder), **settings)
    train(lambda **_: workload, config, jax.devices()[: spanax.MeshShape.of(mesh).size], reported.append)
    return reported


def expected(folder: Path, rows: list[dict[str, np.ndarray]], build: Any = Net) -> dict[str, Any]:
    """The metrics of a trained model on all rows as one batch, on one device."""
    program = spanax.trace(build=build, batch=BATCH, loss=loss, optimizer=optax.sgd(0.1))
    plan = spanax.plan(program, spanax.cluster("cpu:1"), mesh="data=1")
    model = spanax.restore(program, plan, folder / "checkpoints").model()
    model.eval()
    batch = {name: np.stack([row[name] for row in rows]) for name in BATCH}
    value, metrics = loss(model, batch)
    errors = {f"val_error.{name}": value for name, value in metrics["error"].items()}
    return {"val_loss": value, "val_close": metrics["close"], **errors}


@pytest.mark.parametrize(
    ("count", "mesh", "build"),
    sampled(
        [
            (21, "data=2", Net),
            (24, "fsdp=8", Net),
            (19, "fsdp=4,model=2", Net),
            (7, "fsdp=4", Net),
            (21, "pipe=2,data=2", Blocks),
        ],
        [(21, "pipe=2,data=2", Blocks)],
    ),
)
def test_every_metric_averages_all_held_out_examples(count: int, mesh: str, build: Any, tmp_path: Path) -> None:
    rows = examples(count, seed=1)
    reported = trained(tmp_path / "run", rows, mesh, build)
    (event,) = [event for event in reported if event["event"] == "eval"]
    assert event["examples"] == count
    for name, value in expected(tmp_path / "run", rows, build).items():
        np.testing.assert_allclose(event[name], value, rtol=2e-6, err_msg=name)
    assert {name: reported[-1][name] for name in event if name.startswith("val_")} == {
        name: event[name] for name in event if name.startswith("val_")
    }


def test_a_report_has_the_last_metrics_of_both_kinds(tmp_path: Path) -> None:
    reported = trained(tmp_path / "run", examples(21, seed=1))
    report = run_report(tmp_path / "run")
    (event,) = [event for event in reported if event["event"] == "eval"]
    assert report.metrics.last["eval"]["val_close"] == pytest.approx(event["val_close"])
    steps = [event for event in reported if event["event"] == "step"]
    assert report.to_json()["metrics"]["step"]["close"] == pytest.approx(steps[-1]["close"])
    text = report_text(report)
    assert "val_close" in text and "error.mean" in text


def close(model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, Any]:
    error = jnp.abs(model(batch["x"]) - batch["y"])
    return {"close": (error < 1).mean(), "error": {"max": error.max(axis=1).mean(), "by_dim": error.mean(0)}}


def step(model: nnx.Module, optimizer: nnx.Optimizer[Any], batch: Any) -> jax.Array:
    value, grads = nnx.value_and_grad(lambda model: loss(model, batch)[0])(model)
    optimizer.update(model, grads)
    return value


@pytest.mark.parametrize(
    ("count", "mesh", "build", "is_step"),
    [(35, "data=2,model=2", Net, True), (21, "pipe=2,data=2", Blocks, False)],
)
def test_a_custom_evaluation_replaces_the_loss(
    count: int, mesh: str, build: Any, is_step: bool, tmp_path: Path
) -> None:
    rows, trains = examples(count, seed=1), {"train_step": step} if is_step else {"loss": loss}
    options: dict[str, Any] = {"build": build, "batch": BATCH, "optimizer": optax.sgd(0.1), "evaluate": close, **trains}
    is_pipeline = "pipe" in mesh
    workload = spanax.Workload(**options, source=examples(64), validation=rows, microbatches=2 if is_pipeline else 1)
    reported: list[Event] = []
    config = TrainConfig(workload="mine", mesh=mesh, steps=2, output_dir=str(tmp_path / "run"))
    train(lambda **_: workload, config, jax.devices()[: spanax.MeshShape.of(mesh).size], reported.append)
    (event,) = [event for event in reported if event["event"] == "eval"]
    program = spanax.trace(**options)
    plan = spanax.plan(program, spanax.cluster("cpu:1"), mesh="data=1")
    model = spanax.restore(program, plan, tmp_path / "run" / "checkpoints").model()
    model.eval()
    metrics = close(model, {name: np.stack([row[name] for row in rows]) for name in BATCH})
    expected = {"val_close": metrics["close"]} | {f"val_error.{name}": each for name, each in metrics["error"].items()}
    assert event.keys() == {"event", "step", "examples", *expected} and event["examples"] == count
    for name, value in expected.items():
        np.testing.assert_allclose(event[name], value, rtol=2e-6, err_msg=name)
        assert reported[-1][name] == event[name]
    assert reported[-1]["val_loss"] is None and line(event).startswith("step 2  held-out  close 0.")
    recorded = metric_curves(tmp_path / "run")
    assert {name: points.retained for name, points in recorded.evaluated.items()} == {
        "close": [(2, event["val_close"])],
        "error.max": [(2, event["val_error.max"])],
    }
    page = document(run_page(run_record(run_report(tmp_path / "run"))))
    assert "Held-out close" in page and "Held-out error.max" in page and "held-out loss" not in page


@pytest.mark.parametrize(
    ("evaluate", "reported"),
    [
        (lambda model, batch: model(batch["x"]).mean(), "`evaluate` returned a .*, not a dict of metrics"),
        (lambda model, batch: {"name": "net"}, "`evaluate` returned a str as its metric 'name'"),
        (close, "has an `evaluate`, and no held-out examples"),
    ],
)
def test_an_invalid_evaluation_ends_the_run_before_its_first_step(evaluate: Any, reported: str, tmp_path: Path) -> None:
    workload = spanax.Workload(build=Net, batch=BATCH, loss=loss, source=examples(64), evaluate=evaluate)
    config = TrainConfig(workload="mine", mesh="data=2", steps=2, output_dir=str(tmp_path / "run"))
    with pytest.raises(spanax.SpanaxError, match=reported):
        train(lambda **_: workload, config, jax.devices()[:2], lambda event: None)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_at_most_the_requested_batches_are_evaluated(tmp_path: Path) -> None:
    rows = examples(37, seed=1)
    reported = trained(tmp_path / "run", rows, eval_batches=2)
    (event,) = [event for event in reported if event["event"] == "eval"]
    assert event["examples"] == 32
    np.testing.assert_allclose(event["val_loss"], expected(tmp_path / "run", rows[:32])["val_loss"], rtol=2e-6)


def test_lines_name_every_metric() -> None:
    rates = {"tokens_per_second": 12000.0, "examples_per_second": 120.0, "step_seconds": 0.1, "data_wait_seconds": 0.0}
    step = {"event": "step", "step": 3, "loss": 2.5, "grad_norm": 1.0, "close": 0.25, "by_dim": [1.0, 2.0], **rates}
    assert line(step) == "step 3  loss 2.5000  close 0.25  12 k tokens/s  0.100 s"
    event = {"event": "eval", "step": 3, "examples": 21, "val_loss": 2.5, "val_close": 0.5, "bigram_loss": 3.0}
    assert line(event) == "step 3  held-out loss 2.5000  close 0.5 (a bigram: 3.0000)"


def smaller_batches(source: Any, batch: Any, **options: Any) -> list[Any]:
    program = spanax.trace(
        build=lambda rngs: nnx.Embed(300, 8, rngs=rngs), batch=batch, optimizer=optax.sgd(0.1),
        loss=lambda model, batch: jnp.square(model(jax.tree.leaves(batch)[0].astype(int))).mean(),
    )  # fmt: skip
    plan = spanax.plan(program, spanax.cluster("cpu:4"), layout="data")
    loader = spanax.batches(source, plan, mesh=plan.mesh.build(jax.devices()[:4]), shuffle=False, **options)
    return [jax.tree.map(np.asarray, batch) for batch in loader]


FLAT = {"x": jax.ShapeDtypeStruct((4,), "int32")}
ROWS = [{"x": number} for number in range(10)]
IN_BATCHES = [{"x": np.arange(10)[start : start + 4]} for start in (0, 4, 8)]


@pytest.mark.parametrize(
    "source",
    [ROWS, lambda: iter(ROWS), IN_BATCHES, lambda: iter(IN_BATCHES)],
    ids=["sequence", "iterator", "batches", "iterator of batches"],
)
def test_the_smaller_batch_comes_last(source: Any) -> None:
    sizes = [batch["x"].tolist() for batch in smaller_batches(source, FLAT, drop_remainder=False)]
    assert sizes == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("source", [ROWS, lambda: iter(ROWS)], ids=["sequence", "iterator"])
def test_the_remainder_is_that_of_the_last_epoch(source: Any) -> None:
    sizes = [batch["x"].tolist() for batch in smaller_batches(source, FLAT, epochs=3, drop_remainder=False)]
    assert [len(size) for size in sizes] == [4] * 7 + [2] and sum(sizes, []) == 3 * list(range(10))


@pytest.mark.parametrize("source", [ROWS, lambda: iter(ROWS)], ids=["sequence", "iterator"])
def test_by_default_stages_are_excluded(source: Any) -> None:
    assert len(smaller_batches(source, FLAT)) == 2


def test_fewer_examples_than_a_batch_are_one_batch(tmp_path: Path) -> None:
    (batch,) = smaller_batches(ROWS[:3], FLAT, drop_remainder=False)
    assert batch["x"].tolist() == [0, 1, 2]
    np.arange(33, dtype=np.uint16).tofile(tmp_path / "few.bin")
    windows = {name: jax.ShapeDtypeStruct((4, 12), "int32") for name in ("inputs", "targets")}
    (batch,) = smaller_batches(tmp_path / "few.bin", windows, drop_remainder=False)
    assert batch["inputs"].shape == (2, 12) and batch["targets"][1, -1] == 24


def test_a_remainder_needs_an_end() -> None:
    with pytest.raises(spanax.SpanaxError, match="drop_remainder=False needs a number of epochs"):
        spanax.batches(ROWS, spanax.plan(spanax.trace(
            build=lambda rngs: nnx.Embed(300, 8, rngs=rngs), batch=FLAT, optimizer=optax.sgd(0.1),
            loss=lambda model, batch: model(batch["x"]).mean()), spanax.cluster("cpu:4"), layout="data"),
            epochs=None, drop_remainder=False)  # fmt: skip


@pytest.mark.parametrize("has_baseline", [True, False])
def test_the_workload_chooses_the_baseline(has_baseline: bool, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    def baseline(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> float:
        shapes.append((*train.shape, *validation.shape, vocab_size))
        return 1.5

    def text_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return (model(batch["inputs"]) ** 2).mean()

    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    workload = spanax.Workload(
        build=lambda rngs: nnx.Embed(256, 8, rngs=rngs), optimizer=optax.sgd(0.1), loss=text_loss, vocab_size=256,
        batch=dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((4, 8), "int32")),
        source=str(tmp_path / "text.txt"), baseline=baseline if has_baseline else None,
    )  # fmt: skip
    events: list[Event] = []
    config = TrainConfig(workload="mine", layout="data", steps=1, eval_batches=1, output_dir=str(tmp_path / "run"))
    train(lambda **_: workload, config, jax.devices()[:2], events.append)
    evaluation = next(event for event in events if event["event"] == "eval")
    assert evaluation.get("bigram_loss") == events[-1]["bigram_loss"] == (1.5 if has_baseline else None)
    assert ("bigram_loss" in evaluation) == has_baseline
    assert shapes == ([(760, 33, 256)] if has_baseline else [])
