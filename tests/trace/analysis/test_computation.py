"""What a program computes as short texts: equal for equal code, and another one for other code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.trace.analysis.computation import Computation

BATCH = {name: jax.ShapeDtypeStruct((16, 8), "float32") for name in ("x", "y")}
TABLE = np.linspace(0, 1, 64).reshape(8, 8).astype("float32")


class Net(nnx.Module):
    """Two layers, of which one is often forgotten, and statistics."""

    def __init__(self, rngs: nnx.Rngs, activation: Any = jax.nn.gelu, rate: float = 0.1):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(rate, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(self.norm(self.activation(self.up(x)))))


def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> Any:
    difference = model(batch["x"]) - batch["y"] @ TABLE
    return jnp.square(difference).mean(), {"largest": jnp.abs(difference).max()}


def computed(build: Any = Net, loss: Any = loss, optimizer: Any = None, **asked: Any) -> Computation:
    optimizer = optimizer or optax.adamw(spanax.logged(optax.cosine_decay_schedule(1e-3, 100), "rate"))
    return spanax.trace(build=build, loss=loss, optimizer=optimizer, batch=BATCH, **asked).computation


@pytest.fixture(scope="module")
def before() -> Computation:
    return computed()


def reordered(model: Any, batch: dict[str, jax.Array]) -> Any:
    target = batch["y"] @ TABLE
    activated = model.activation(model.up(batch["x"]))
    error = model.down(model.dropout(model.norm(activated))) - target
    largest = jnp.abs(error).max()
    unused = jnp.sin(error).sum()  # noqa: F841
    return jax.jit(lambda x: jnp.square(x).mean())(error), {"largest": largest}


def pinned(model: Any, batch: dict[str, jax.Array]) -> Any:
    x = jax.lax.optimization_barrier(batch["x"])
    return loss(model, batch | {"x": x})


def error_of(change: Callable[[jax.Array], jax.Array]) -> Any:
    """The loss with another error."""

    def other(model: Any, batch: dict[str, jax.Array]) -> Any:
        return jnp.square(change(model(batch["x"]) - batch["y"] @ TABLE)).mean(), {}

    return other


def rounded(model: Any, batch: dict[str, jax.Array]) -> Any:
    """The table of a machine whose math library rounds otherwise."""
    noise = np.random.default_rng(0).normal(size=TABLE.shape)
    table = (TABLE.astype("float64") * (1 + 1e-7 * noise)).astype("float32")
    assert (table != TABLE).any()
    difference = model(batch["x"]) - batch["y"] @ table
    return jnp.square(difference).mean(), {"largest": jnp.abs(difference).max()}


EQUAL: dict[str, dict[str, Any]] = {
    "again": {},
    "another learning rate, over other steps": {"optimizer": optax.adamw(optax.cosine_decay_schedule(1e-2, 999))},
    "clipped": {"clip_norm": 1.0},
    "rematerialized": {"remat": "dots"},
    "computed in bfloat16": {"compute_dtype": "bfloat16"},
    "in microbatches": {"microbatches": 2, "accumulate": "mean"},
    "other names and order": {"loss": reordered},
    "with a barrier": {"loss": pinned},
    "with a table rounded otherwise": {"loss": rounded},
}


@pytest.mark.parametrize("how", EQUAL)
def test_changes_that_do_not_affect_the_digest(before: Computation, how: str) -> None:
    after = computed(**EQUAL[how])
    assert after == before and not after.differences(before)


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return x


halved.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent / 2,))


def changed(change: Callable[[jax.Array], jax.Array], **metrics: float) -> Any:
    def other(model: Any, batch: dict[str, jax.Array]) -> Any:
        value, extra = loss(model, batch)
        return change(value), extra | {name: jnp.float32(number) for name, number in metrics.items()}

    return other


CHANGED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another activation": (
        {"build": lambda rngs: Net(rngs, jnp.tanh)},
        ["the loss", "the gradients", "the state after a step", "operations: "],
    ),
    "another number": (
        {"build": lambda rngs: Net(rngs, rate=0.2)},
        ["the loss", "the gradients", "the same operations on other numbers or in another order"],
    ),
    "another loss": (
        {"loss": changed(lambda value: value * 2)},
        ["the loss", "the gradients", "operations: "],
    ),
    "another metric": (
        {"loss": changed(lambda value: value, largest=0.0)},
        ["the loss", "operations: "],
    ),
    "another gradient": (
        {"loss": changed(halved)},
        ["the gradients", "operations: "],
    ),
    "another table": (
        {"loss": lambda model, batch: loss(model, batch | {"y": batch["y"] * 1.0 @ TABLE[::-1]})},
        ["the loss", "the gradients", "operations: "],
    ),
}


@pytest.mark.parametrize("how", CHANGED)
def test_changes_of_the_computation_are_listed(before: Computation, how: str) -> None:
    asked, expected = CHANGED[how]
    problems = computed(**asked).differences(before)
    assert len(problems) == len(expected) and all(map(str.startswith, problems, expected)), problems


def scanned(step: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.scan(lambda carry, row: (carry, step(row)), 0.0, x)[1]


PAIRS: dict[str, tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]] = {
    "a parameter of an operation": (lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(x, 1)),
    "the dims of a product": (
        lambda x: jax.lax.dot_general(x, x, (((0,), (0,)), ((), ()))),
        lambda x: jax.lax.dot_general(x, x, (((1,), (1,)), ((), ()))),
    ),
    "what a loop does": (scanned(jnp.tanh), scanned(jnp.sin)),
    "what a branch does": (
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x),
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.tanh, x),
    ),
    "what a function within does": (jax.jit(lambda x: jnp.tanh(x) + x), jax.jit(lambda x: jnp.sin(x) + x)),
}


@pytest.mark.parametrize("what", PAIRS)
def test_functions_inside_operations_affect_the_digest(what: str) -> None:
    first, second = (computed(loss=error_of(change)) for change in PAIRS[what])
    assert first == computed(loss=error_of(PAIRS[what][0]))
    assert second.differences(first)[0] == "the loss"


def test_a_constant_counts(before: Computation) -> None:
    def shifted(model: Any, batch: dict[str, jax.Array]) -> Any:
        difference = model(batch["x"]) - batch["y"] @ (TABLE + np.eye(8, dtype="float32"))
        return jnp.square(difference).mean(), {"largest": jnp.abs(difference).max()}

    assert computed(loss=shifted).differences(before)[-1] == "the same operations on other numbers or in another order"


def test_a_train_step_counts_with_its_optimizer() -> None:
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        (value, metrics), grads = nnx.value_and_grad(loss, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return {"loss": value} | metrics

    def local(rate: float) -> Computation:
        return spanax.trace(build=Net, train_step=train_step, optimizer=optax.sgd(rate), batch=BATCH).computation

    assert local(0.1) == local(0.1)
    assert local(0.1).differences(local(0.2))[0] == "the state after a step"


def test_the_record_is_plain_and_complete(before: Computation) -> None:
    assert Computation.from_json(json.loads(json.dumps(before.to_json()))) == before
    other = Computation.from_json(before.to_json() | {"versions": dict(before.versions) | {"jax": "0.0.1"}})
    assert before.other_versions(other) == [f"jax 0.0.1, now {jax.__version__}"]
    with pytest.raises(ValueError):
        Computation.from_json({"loss": 1})


SCRIPT = """
import json, sys, test_computation
if sys.argv[1:]:
    [object() for _ in range(100_000)]
print(json.dumps(test_computation.computed().to_json()))
"""


def test_processes_agree(before: Computation, tmp_path: Path) -> None:
    """Of other hash seeds, and with the same code on other lines of another file."""
    (tmp_path / "test_computation.py").write_text("# moved\n" * 50 + Path(__file__).read_text())
    folders = [Path(__file__).parent, tmp_path]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *["moved"] * seed],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, folder in enumerate(folders, 1)
    ]
    texts = [child.communicate(timeout=240)[0] for child in children]
    assert [Computation.from_json(json.loads(text)) for text in texts] == [before] * 2
