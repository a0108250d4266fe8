"""A run that begins from the weights of another: which of its state is taken over, and which is new."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import DataError
from spanax.show.live.events import line
from spanax.train.config import TrainConfig
from spanax.train.state import weights
from spanax.train.trainer import train

BATCH = jax.ShapeDtypeStruct((8, 16), "float32")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(x)))


class Model(nnx.Module):
    """Blocks as a list or a stack, statistics, and random state."""

    def __init__(self, stacked: bool, dtype: Any, rngs: nnx.Rngs):
        built = [Block(rngs) for _ in range(2)]
        self.blocks = spanax.Stack(Block, 2, rngs=rngs) if stacked else nnx.List(built)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 8, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.blocks(x) if isinstance(self.blocks, spanax.Stack) else self.blocks[1](self.blocks[0](x))
        return self.head(self.drop(self.norm(x)))


def program(stacked: bool = False, dtype: Any = "float32", optimizer: Any = None) -> spanax.Program:
    return spanax.trace(
        build=lambda rngs: Model(stacked, dtype, rngs),
        optimizer=optimizer or optax.adam(0.1),
        batch=BATCH,
        loss=lambda model, x: (model(x) ** 2).mean(),
        accumulate="mean",  # the model has batch norm
    )


def plan(of: spanax.Program, mesh: str = "data=1", layout: str | None = None) -> spanax.Plan:
    return spanax.plan(of, spanax.cluster(f"cpu:{spanax.MeshShape.of(mesh).size}"), mesh=mesh, layout=layout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[spanax.Run, Path]:
    """A run of two steps, and where it was saved."""
    folder, of = tmp_path_factory.mktemp("trained"), program()
    run = spanax.start(of, plan(of, "fsdp=4"))
    for seed in range(2):
        run.step(np.random.default_rng(seed).normal(size=(8, 16)).astype("float32"))
    run.save(folder).wait()
    return run, folder


def stacked_of(arrays: dict[str, jax.Array], path: str) -> np.ndarray:
    first, _, rest = path.partition(".")
    return np.stack([arrays[f"{first}.{number}.{rest}"] for number in range(2)])


def test_weights_and_statistics_are_taken_and_the_rest_is_new(trained: tuple[spanax.Run, Path]) -> None:
    before, folder = trained
    of = program()
    run, fresh = (spanax.start(of, plan(of, "fsdp=2,model=2"), seed=3, init=init) for init in (folder, None))
    assert run.num_steps == 0
    for leaf in of.leaves:
        took = leaf.kind == "param" or leaf.path.startswith("norm.")
        expected = (before if took else fresh).arrays()[leaf.path]
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            expected, result = jax.random.key_data(expected), jax.random.key_data(run.arrays()[leaf.path])
        else:
            result = run.arrays()[leaf.path]
        np.testing.assert_array_equal(result, expected, err_msg=leaf.path)
    assert float(np.abs(before.arrays()["norm.mean"]).max()) > 0, "the test compares nothing with nothing"
    run.step(np.ones((8, 16), "float32"))


def test_a_stack_begins_from_a_list_in_another_dtype(trained: tuple[spanax.Run, Path]) -> None:
    before, folder = trained
    of = program(stacked=True, dtype="bfloat16")
    run = spanax.start(of, plan(of, "fsdp=4"), init=folder)
    held, arrays = run.arrays(), before.arrays()
    np.testing.assert_array_equal(held["blocks.up.kernel"], stacked_of(arrays, "blocks.up.kernel"))
    np.testing.assert_array_equal(held["head.kernel"], arrays["head.kernel"].astype("bfloat16"))
    assert held["head.kernel"].dtype == jnp.bfloat16


def test_parameter_copies_of_an_optimizer_start_from_the_weights(trained: tuple[spanax.Run, Path]) -> None:
    """Slow weights of Lookahead, averages: they begin as the parameters, so as the ones that were taken over."""

    def averaging() -> optax.GradientTransformation:
        return optax.GradientTransformation(
            lambda params: {"same": params, "half": jax.tree.map(lambda p: p / 2, params)},
            lambda updates, state, params=None: (jax.tree.map(lambda u: -0.1 * u, updates), state),
        )

    before, folder = trained
    of = program(optimizer=averaging())
    run = spanax.start(of, plan(of, "fsdp=4"), init=folder)
    kernel = before.arrays()["blocks.0.up.kernel"]
    result = {path: array for path, array in run.arrays("optimizer").items() if path.endswith("blocks.0.up.kernel")}
    assert len(result) == 2
    for path, array in result.items():
        np.testing.assert_array_equal(array, kernel / 2 if "half" in path else kernel, err_msg=path)
    run.step(np.ones((8, 16), "float32"))  # a buffer that two leaves shared could not be donated twice


def test_a_pipeline_starts_from_imported_weights(trained: tuple[spanax.Run, Path]) -> None:
    before, folder = trained
    of = program(stacked=True)
    run = spanax.start(of, plan(of, "pipe=2,data=2"), init=folder)
    np.testing.assert_array_equal(run.params()["blocks.up.kernel"], stacked_of(before.arrays(), "blocks.up.kernel"))


def test_weights_of_another_model_are_refused(trained: tuple[spanax.Run, Path], tmp_path: Path) -> None:
    _, folder = trained
    of = spanax.trace(
        build=lambda rngs: nnx.Linear(16, 8, rngs=rngs), optimizer=optax.sgd(0.1), batch=BATCH,
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    with pytest.raises(DataError, match="of another model.*; arrays: 2 missing, 14 unexpected"):
        spanax.start(of, plan(of), init=folder)
    with pytest.raises(DataError, match="no checkpoint found"):
        spanax.start(of, plan(of), init=folder / "nowhere")
    shapes = {"kernel": (16, 8), "bias": (8,)}
    parts = {
        path: weights.Part(shape, np.dtype("float32"), partial(np.ones, shape, "float32"))
        for path, shape in shapes.items()
    }
    weights.write(tmp_path, parts, plan_json="{}", meta={})
    with pytest.raises(DataError, match="the checkpoint contains weights only"):
        spanax.restore(of, plan(of), tmp_path)
    assert float(spanax.start(of, plan(of), init=tmp_path).params()["kernel"].min()) == 1


class Grown(Model):
    """The model with an adapter and a head of another width."""

    def __init__(self, stacked: bool, rngs: nnx.Rngs):
        super().__init__(stacked, "float32", rngs)
        self.head = nnx.LoRALinear(16, 8, lora_rank=2, rngs=rngs)
        self.value = nnx.Linear(8, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(16, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.value(super().__call__(x))


def grown(stacked: bool = False, build: Any = None) -> spanax.Program:
    return spanax.trace(
        build=build or (lambda rngs: Grown(stacked, rngs)), optimizer=optax.adam(0.1), batch=BATCH,
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_a_model_with_more_weights_loads_the_shared_ones(trained: tuple[spanax.Run, Path], stacked: bool) -> None:
    before, folder = trained
    of = grown(stacked)
    run, fresh = (spanax.start(of, plan(of, "fsdp=4"), init=init, partial=init is not None) for init in (folder, None))
    assert run.loaded is not None and fresh.loaded is None
    new = ("head.lora_a", "head.lora_b", "value.bias", "value.kernel")
    assert [path for path in run.loaded.missing if "." in path] == sorted(
        leaf.path for leaf in of.leaves if leaf.path.startswith(("head.lora", "value."))
    )
    assert len(run.loaded.missing) == len(new)
    assert run.loaded.unexpected == ("norm.bias",) and run.loaded.mismatched == ()
    arrays, old, untouched = run.arrays(), before.arrays(), fresh.arrays()
    for path in run.loaded.loaded:
        saved = stacked_of(old, path) if stacked and path.startswith("blocks.") else old[path]
        np.testing.assert_array_equal(arrays[path], saved, err_msg=path)
    for path in run.loaded.missing:
        np.testing.assert_array_equal(arrays[path], untouched[path], err_msg=path)
    weights_of = {leaf.path for leaf in of.leaves if weights.is_weight(leaf)}
    assert {*run.loaded.loaded, *run.loaded.missing} == weights_of
    text = str(run.loaded)
    assert "norm.bias" in text and "value.kernel" in text
    run.step(np.ones((8, 16), "float32"))


def test_a_head_of_another_shape_is_listed_and_not_loaded(trained: tuple[spanax.Run, Path]) -> None:
    _, folder = trained

    def build(rngs: nnx.Rngs) -> Model:
        model = Model(False, "float32", rngs)
        model.head = nnx.Linear(16, 3, rngs=rngs)
        return model

    of = grown(build=build)
    loaded = spanax.start(of, plan(of, "fsdp=4"), init=folder, partial=True).loaded
    assert loaded is not None and loaded.missing == () and loaded.unexpected == ()
    assert loaded.mismatched == (
        "head.bias: model float32[3], checkpoint float32[8]",
        "head.kernel: model float32[16,3], checkpoint float32[16,8]",
    )


def test_partial_is_advised_where_weights_match_and_needs_them(trained: tuple[spanax.Run, Path]) -> None:
    _, folder = trained
    of = grown()
    with pytest.raises(DataError, match="of another model") as caught:
        spanax.start(of, plan(of), init=folder)
    assert "partial=True" in str(caught.value) and "--init-partial" in str(caught.value)
    assert "contains weights only" not in str(caught.value)
    with pytest.raises(spanax.SpanaxError, match="`partial` requires `init`"):
        spanax.start(of, plan(of), partial=True)
    other = grown(build=lambda rngs: nnx.Linear(16, 8, rngs=rngs))
    with pytest.raises(DataError, match="none of the 2 weights") as caught:
        spanax.start(other, plan(other), init=folder, partial=True)
    with pytest.raises(DataError, match="of another model") as caught:
        spanax.start(other, plan(other), init=folder)
    assert "partial=True" not in str(caught.value)


def test_layers_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    parts = {
        f"blocks.{number}.kernel": weights.Part((2,), np.dtype(dtype), lambda dtype=dtype: np.ones(2, dtype))
        for number, dtype in enumerate(("float32", "float16"))
    }
    weights.write(tmp_path, parts, plan_json="{}", meta={})
    with pytest.raises(DataError, match="in another dtype"):
        weights.Source.of(tmp_path).groups({"blocks.kernel": jax.ShapeDtypeStruct((2, 2), "float32")})


def test_weights_that_cannot_be_read_leave_no_files(tmp_path: Path) -> None:
    def broken() -> np.ndarray:
        raise DataError("a file has become shorter.")

    parts = {"a": weights.Part((2,), np.dtype("float32"), lambda: np.ones(2, "float32"))}
    parts |= {"b": weights.Part((1 << 21,), np.dtype("float32"), broken)}
    with pytest.raises(DataError, match="shorter"):
        weights.write(tmp_path / "steps", parts, plan_json="{}", meta={})
    assert not list((tmp_path / "steps").iterdir())


def test_the_trainer_loads_initial_weights_once(tmp_path: Path) -> None:
    """`--init` at the start and before the first save; a resumed run does not need it."""
    rows = [{"x": np.full(16, number % 5, "float32")} for number in range(64)]

    def workload(**_: Any) -> spanax.Workload:
        return spanax.Workload(
            build=lambda rngs: nnx.Linear(16, 4, rngs=rngs),
            batch={"x": BATCH},
            loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
            optimizer=optax.sgd(0.0),
            source=rows,
        )

    def run(out: str, **settings: Any) -> dict[str, Any]:
        reported: list[dict[str, Any]] = []
        config = TrainConfig(workload="mine", layout="data", steps=2, output_dir=str(tmp_path / out), **settings)
        train(workload, config, jax.devices()[:2], reported.append)
        return reported[0]

    def kernel(out: str) -> np.ndarray:
        of = workload().trace(learning_rate=0.0, num_steps=1)
        return np.asarray(spanax.restore(of, plan(of), tmp_path / out / "checkpoints").params()["kernel"])

    run("first", seed=1)
    started = run("second", seed=2, init=str(tmp_path / "first"))
    assert started["init"] == str(tmp_path / "first")
    np.testing.assert_array_equal(kernel("second"), kernel("first"))
    run("third", seed=2)
    assert np.abs(kernel("third") - kernel("first")).max() > 0
    started = run("third", seed=2, init=str(tmp_path / "first"), resume=True)
    assert "init" not in started and started["step"] == 2
    with pytest.raises(spanax.SpanaxError, match="requires `init`"):
        run("fourth", init_partial=True)
    recorded = json.loads((tmp_path / "second" / "metrics.jsonl").read_text().splitlines()[0])
    assert recorded["init"] == str(tmp_path / "first")
    adapted = run("adapted", init=str(tmp_path / "first"), lora="rank=2", quantize="int8")
    assert adapted["trained_parameters"] == 2 * (16 + 4) and "108 parameters from" in line(adapted)
    assert ", 40 trained, layout data on" in line(adapted)
    with pytest.raises(spanax.SpanaxError, match="fix: --lora with --quantize, as its run had"):
        run("fifth", init=str(tmp_path / "adapted"))
