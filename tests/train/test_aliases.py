"""Aliases: Variables and raw arrays that begin as one array are state of their own, each in its own buffer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled

BATCH = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
TABLE, HOST_TABLE, KEY = jnp.arange(16.0) / 16, np.arange(4096, dtype="float32"), jax.random.key(3)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


class Distilled(nnx.Module):
    """A student and a copy of it that follows it; also arrays that belong to the user's program."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.student = Net(rngs)
        self.teacher = nnx.clone(self.student)
        self.first, self.second = TABLE, TABLE
        self.variable, self.host = nnx.Variable(TABLE), nnx.List([HOST_TABLE, HOST_TABLE])
        self.key, self.spare = KEY, KEY


def loss(model: Any, x: jax.Array) -> jax.Array:
    model.key, key = jax.random.split(model.key)
    target = jax.lax.stop_gradient(model.teacher(x)) + jax.random.normal(key, x.shape)
    return ((model.student(x) * model.first - target - x) ** 2).mean()


def train_step(model: Any, optimizer: Any, x: jax.Array) -> Any:
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    mixed = jax.tree.map(
        lambda old, new: 0.9 * old + 0.1 * new, nnx.state(model.teacher, nnx.Param), nnx.state(model.student, nnx.Param)
    )
    nnx.update(model.teacher, mixed)
    return value


def build(rngs: nnx.Rngs) -> Distilled:
    return Distilled(rngs)


@pytest.mark.parametrize("count", sampled([1, 8], [8]))
def test_clones_are_separate_state(count: int) -> None:
    program = spanax.trace(build=build, optimizer=optax.adamw(1e-2, eps=0.1), batch=BATCH, train_step=train_step)
    run = spanax.start(program, spanax.plan(program, spanax.cluster(f"cpu:{count}"), layout="data"))
    assert len(addresses(run.state)) == len(run.state)
    losses = [float(run.step(BATCH)["loss"]) for _ in range(3)]
    assert len(addresses(run.state)) == len(run.state)

    model = build(nnx.Rngs(0))
    optimizer, step = nnx.Optimizer(model, optax.adamw(1e-2, eps=0.1), wrt=nnx.Param), nnx.jit(train_step)
    np.testing.assert_allclose(losses, [float(step(model, optimizer, BATCH)) for _ in range(3)], rtol=1e-5)
    arrays = run.arrays()
    for owner in ("student", "teacher"):
        kernel, expected = arrays[f"{owner}.linear.kernel"], getattr(model, owner).linear.kernel[...]
        np.testing.assert_allclose(kernel, expected, rtol=1e-5, atol=1e-6)
        assert arrays[f"{owner}.dropout.rngs.count"] == 3
    assert not np.array_equal(arrays["student.linear.kernel"], arrays["teacher.linear.kernel"])
    assert not np.array_equal(*(jax.random.key_data(arrays[path]) for path in ("key", "spare")))
    assert (
        TABLE.tolist() == [index / 16 for index in range(16)] and HOST_TABLE[15] == 15
    )  # the user's own arrays are not donated
    assert jax.random.key_data(KEY).tolist() == jax.random.key_data(jax.random.key(3)).tolist()


def addresses(state: list[jax.Array]) -> set[int]:
    """Where the arrays are in the memory of the first device."""
    is_key = lambda array: jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)  # noqa: E731
    data = [jax.random.key_data(array) if is_key(array) else array for array in state]
    return {array.addressable_shards[0].data.unsafe_buffer_pointer() for array in data}
