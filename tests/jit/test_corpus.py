"""Models as people write them train under `spanax.jit` as under `nnx.jit`, or are refused with a reason."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import spanax
from byo import corpus
from byo.test_byo import NOUGHT, OF_MOMENTS, TOLERANCE
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.trace.variables import model_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix"),
]

PRESETS = [preset for preset in corpus.MESHES if corpus.microbatches(preset) == 1]
# Objects that are created under a mesh of the user are sharded over it, which is an error: test_bad_calls.py.
FILES = [name for name in corpus.FILES if not hasattr(corpus.model(name), "mesh")]
CASES = [(name, preset) for name in FILES for preset in PRESETS]
QUICK = [("gan", "hsdp"), ("raw_arrays", "fsdp"), ("multi_task", "fsdp+tensor"), ("ema_clone", "zero1")]


def train_step(name: str, value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    """The train step of a model, or the one that its author would write around its loss."""
    case = corpus.model(name)

    def loss(model: Any, batch: Any) -> Any:
        returned = case.loss(model, batch)
        return returned if isinstance(returned, tuple) else (returned, {})

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        if hasattr(case, "train_step"):
            value = case.train_step(model, optimizer, batch)["loss"]
        else:
            trained = nnx.DiffState(0, getattr(case, "wrt", nnx.Param))
            (value, _), grads = value_and_grad(loss, argnums=trained, has_aux=True)(model, batch)
            optimizer.update(model, grads)
        nnx.pop(model, nnx.Intermediate)
        return value

    return step


def trained(name: str, step: Callable[..., Any]) -> dict[str, np.ndarray]:
    """The losses, and every array of the objects after the last step."""
    case = corpus.model(name)
    with corpus.under_its_mesh(case):
        built = model_of(case.build, 3) if callable(case.build) else case.build
        model, optimizer = built, corpus.optimizer(name)(built)
        losses = [float(step(model, optimizer, corpus.batch(name, index))) for index in range(corpus.STEPS)]
    state = nnx.to_flat_state(nnx.state((model, optimizer)))
    arrays = {
        jax.tree_util.keystr((path, *inner)): leaf
        for path, variable in state
        for inner, leaf in jax.tree_util.tree_flatten_with_path(variable)[0]
    }
    return {"loss": np.array(losses)} | {path: corpus.numbers(array) for path, array in arrays.items()}


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    return trained(name, nnx.jit(train_step(name, nnx.value_and_grad)))


@pytest.mark.parametrize(("name", "preset"), sampled(CASES, QUICK))
def test_three_steps_are_those_of_one_device(name: str, preset: str) -> None:
    value_and_grad = spanax.value_and_grad if preset == "ring" else nnx.value_and_grad
    step = spanax.jit(train_step(name, value_and_grad), layout=preset, mesh=corpus.MESHES[preset])
    expected = reference(name)
    try:
        result = trained(name, step)
    except SpanaxError as error:
        with pytest.raises(type(error)):
            corpus.planned(name, preset)
        pytest.skip(str(error).splitlines()[0])
    assert expected.keys() == result.keys()
    case = corpus.model(name)
    for path, target in expected.items():
        bound = getattr(case, "tolerance", OF_MOMENTS if "opt_state" in path else TOLERANCE)
        bound = max([bound, *(much for end, much in getattr(case, "looser", {}).items())])
        much = np.abs(target - result[path]).max(initial=0) / max(np.abs(target).max(initial=0), NOUGHT)
        assert much <= bound, f"{path}: {much:.1e}"
