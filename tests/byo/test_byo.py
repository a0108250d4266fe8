"""Models as people write them: each is traced, planned in every preset or refused with a reason, and trained."""

import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import spanax
import zoo
from byo import corpus
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.plan.place import as_planned
from spanax.plan.presets import PRESETS
from spanax.train.run import Run

# Models still do it; what it collects is not state. Qwix 0.1.8 uses what Flax deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix"),
]

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "byo"

TOLERANCE, OF_MOMENTS = 1e-5, 1e-4
"""Largest difference over the largest value, for the loss and each array; of moments, whose noise is a gradient's."""

NOUGHT = 1e-3
"""Arrays that stay below this are rounding about zero (a key's bias under softmax): held against it instead."""

QUICK = [("explicit", "fsdp+tensor"), ("gan", "hsdp"), ("lora_gpt", "ring"), ("transformer_xl", "fsdp+tensor+seq")]
"""What is run in every test; `slow` is every model in every preset. Presets are tried in run/test_parity.py, too."""


def cases() -> list[tuple[str, str]]:
    return [(name, preset) for name in corpus.FILES for preset in corpus.MESHES]


@functools.cache
def refused(name: str, preset: str) -> str | None:
    """Why a preset does not apply, in one line."""
    try:
        corpus.planned(name, preset)
    except SpanaxError as error:
        assert len(str(error).splitlines()) <= 4 and "fix: " in str(error)
        return str(error).splitlines()[0]
    return None


def described(name: str) -> str:
    """The axes that were found, and what becomes of every preset."""
    axes = [f"{axis.name} {'/'.join(map(str, axis.sizes))}" for axis in corpus.program(name).axes]
    why = {preset: refused(name, preset) for preset in corpus.MESHES}
    applies = " ".join(preset for preset in why if why[preset] is None)
    return "\n".join(
        [f"axes: {', '.join(sorted(axes))}", f"planned: {applies}"]
        + [f"{preset}: {reason}" for preset, reason in why.items() if reason]
        + [""]
    )


SMALL = {
    "byol", "ema_clone", "ensemble", "explicit", "flow", "gan", "graph_net", "lora_gpt", "lru", "masked_loss",
    "multi_task", "pixelcnn", "sharded", "solver", "sorted_moe", "tagged", "transformer_xl", "vqvae",
}  # fmt: skip
"""Of each kind the models that are traced fast."""


@pytest.mark.parametrize("name", sampled([*corpus.FILES, *zoo.ZOO], SMALL))
def test_every_preset_is_planned_or_refused_with_a_reason(name: str) -> None:
    axes = corpus.program(name).step.axes
    assert not axes.unknown
    result, golden = described(name), GOLDEN / f"{name}.txt"
    if os.environ.get("SPANAX_GOLDEN") == "update":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(result)
    assert result == golden.read_text()


IN_BFLOAT16 = {"lru", "vqvae", "masked_loss"}


@pytest.mark.parametrize("name", sampled([*corpus.FILES, *zoo.ZOO], IN_BFLOAT16))
def test_accelerators_plan_in_bfloat16_or_the_cause_is_named(name: str) -> None:
    case = corpus.model(name)
    if hasattr(case, "train_step"):
        pytest.skip("its train step chooses the dtype")
    arguments = {
        "build": case.build,
        "optimizer": corpus.optimizer(name),
        "batch": case.batch(corpus.SIZE),
        "loss": case.loss,
    }
    try:
        with corpus.under_its_mesh(case):
            program = spanax.trace(**arguments, compute_dtype="bfloat16")
    except SpanaxError as error:
        assert name in {"lru", "pixelcnn", "vqvae"} and len(str(error).splitlines()) <= 4
        assert str(error).startswith("the loss cannot be computed in bfloat16: ")
        if name != "lru":  # complex matmuls: no dtype is chosen for it
            with corpus.under_its_mesh(case):
                plan = spanax.plan(corpus.program(name), spanax.cluster("h100:8"), layout="data")
            assert plan.setting.dtypes == ("float32",)
            assert "computed in float32: the loss cannot be computed in bfloat16: " in plan.why
        with corpus.under_its_mesh(case):
            program = spanax.trace(**arguments, compute_dtype="float32")
    for cluster in ("v5e:2x4", "h100:8"):
        plan = spanax.plan(program, spanax.cluster(cluster), layout="data")
        assert plan.schedule.compute_dtype == program.compute_dtype


@functools.cache
def reference(name: str, count: int) -> tuple[list[Any], dict[str, np.ndarray]]:
    """A birth, and what becomes of it on one device: by an ordinary loop of NNX, or in microbatches by Spanax."""
    program = corpus.program(name, count)
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:1"), layout="data"), seed=3)
    if count > 1:
        return [], trained(run, name)
    is_key = [jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) for array in run.state]
    born = [array.copy() if key else np.array(array) for array, key in zip(run.state, is_key, strict=True)]
    return born, corpus.trained_without_spanax(name, [*map(jax.numpy.asarray, born)])


def trained(run: Run, name: str) -> dict[str, np.ndarray]:
    losses = [float(run.step(corpus.batch(name, step))["loss"]) for step in range(corpus.STEPS)]
    return {"loss": np.array(losses)} | {path: corpus.numbers(array) for path, array in run.arrays().items()}


@pytest.mark.parametrize(("name", "preset"), sampled(cases(), QUICK))
def test_three_steps_are_those_of_one_device(name: str, preset: str) -> None:
    count = corpus.microbatches(preset)
    if (why := refused(name, preset)) is not None:
        pytest.skip(why)
    born, expected = reference(name, count)
    built, plan = corpus.program(name, count), corpus.planned(name, preset)
    if count == 1:  # births are compared in test_state.py
        mesh = plan.mesh.build()
        run = Run(
            as_planned(built, plan),
            plan,
            mesh,
            # Copies: the step gives its state away, and a key that is put on a device may be the one it was.
            [jax.device_put(a.copy(), leaf.sharding(mesh)) for a, leaf in zip(born, plan.leaves, strict=True)],
        )
    else:
        run = spanax.start(built, plan, seed=3)
    result, case = trained(run, name), corpus.model(name)
    assert expected.keys() == result.keys()
    for path, target in expected.items():
        bound = getattr(case, "tolerance", OF_MOMENTS if path.startswith("optimizer.") else TOLERANCE)
        bound = max([bound, *(much for end, much in getattr(case, "looser", {}).items() if path.endswith(end))])
        much = np.abs(target - result[path]).max(initial=0) / max(np.abs(target).max(initial=0), NOUGHT)
        assert much <= bound, f"{path}: {much:.1e}"


def test_every_preset_is_tried() -> None:
    assert set(PRESETS) == {preset.removesuffix("+seq") for preset in corpus.MESHES}
