"""Raw arrays: attributes of modules and optimizers that are arrays and not Variables are state, as for `nnx.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.train.run import Run

BATCH = np.linspace(-1, 1, 8 * 16, dtype="float32").reshape(8, 16)


class Masked(nnx.Module):
    """Raw arrays in every place where NNX takes them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((16, 16)))
        self.noise = jax.random.normal(rngs.params(), (16,))
        self.freqs = np.arange(16)
        self.parts = nnx.List([jnp.ones(16), jnp.zeros(16)])
        self.named = nnx.Dict(scale=jnp.full(16, 2.0))
        self.table = nnx.data({"x": jnp.ones(16), "rows": [np.ones(16, "float32")]})
        self.key = rngs.params()
        self.count = jnp.array(0)
        self.inner = Plain()

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count += 1
        self.key, key = jax.random.split(self.key)
        self.parts[1] = self.parts[1] + 1.0
        x = self.linear(x) @ self.mask + self.noise * self.freqs * self.named["scale"]
        x = x * self.parts[0] * self.table["x"] * self.table["rows"][0] + self.inner.shift
        return x + 0.01 * jax.random.normal(key, x.shape)


class Plain(nnx.Module, pytree=False):
    """A module that is not a pytree."""

    def __init__(self) -> None:
        self.shift = jnp.full(16, 0.5)


class Averaging(nnx.Optimizer):
    """An optimizer that keeps a raw array of its own."""

    def __init__(self, model: nnx.Module, tx: Any) -> None:
        super().__init__(model, tx, wrt=nnx.Param)
        self.bias_average = jnp.zeros(16)

    def update(self, model: Any, grads: Any, **kwargs: Any) -> None:
        super().update(model, grads, **kwargs)
        self.bias_average = 0.9 * self.bias_average + 0.1 * model.linear.bias[...]


RAW = ["count", "freqs", "inner.shift", "key", "mask", "named.scale", "noise", "parts.0", "parts.1"]
RAW += ["table.rows.0", "table.x"]


def loss(model: Any, x: jax.Array) -> jax.Array:
    return ((model(x) - x) ** 2).mean()


def train_step(model: Any, optimizer: Any, x: jax.Array) -> Any:
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return {"loss": value}


def averaging(model: nnx.Module) -> nnx.Optimizer:
    return Averaging(model, optax.adamw(1e-2))


def start(layout: str = "fsdp", devices: int = 8, **step: Any) -> Run:
    program = spanax.trace(build=Masked, optimizer=averaging, batch=BATCH, **step or {"loss": loss})
    return spanax.start(program, spanax.plan(program, spanax.cluster(f"cpu:{devices}"), layout=layout), seed=5)


def by_nnx(steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final state of an ordinary NNX loop."""
    model = Masked(nnx.Rngs(5))
    optimizer = averaging(model)
    step = nnx.jit(train_step)
    losses = [float(step(model, optimizer, BATCH)["loss"]) for _ in range(steps)]
    return losses, {
        "mask": np.asarray(model.mask),
        "count": np.asarray(model.count),
        "parts.1": np.asarray(model.parts[1]),
        "key": np.asarray(jax.random.key_data(model.key)),
        "linear.kernel": np.asarray(model.linear.kernel[...]),
        "optimizer.bias_average": np.asarray(optimizer.bias_average),
    }


def numbers(array: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


@pytest.mark.parametrize("step", [{"loss": loss}, {"train_step": train_step}], ids=["loss", "train_step"])
def test_raw_arrays_train_as_under_nnx_jit(step: dict[str, Any]) -> None:
    run = start(**step)
    kinds = {leaf.path: leaf.kind for leaf in run.program.leaves}
    assert [path for path, kind in kinds.items() if kind == "other"] == RAW
    assert kinds["optimizer.bias_average"] == "optimizer"
    losses, state = by_nnx(3)
    np.testing.assert_allclose([float(run.step(BATCH)["loss"]) for _ in range(3)], losses, rtol=1e-5)
    arrays = run.arrays()
    for path, expected in state.items():
        np.testing.assert_allclose(numbers(arrays[path]), expected, rtol=1e-5, atol=1e-6, err_msg=path)


def test_a_restored_model_has_its_raw_arrays() -> None:
    run = start("data")
    run.step(BATCH)
    model: Any = run.model()
    np.testing.assert_array_equal(model.mask, np.tril(np.ones((16, 16))))
    assert int(model.count) == 1 and isinstance(model.freqs, jax.Array) and model.freqs.tolist() == list(range(16))
    assert nnx.jit(loss)(model, BATCH).shape == ()


def test_raw_arrays_are_saved_and_restored(tmp_path: Any) -> None:
    run = start()
    run.step(BATCH)
    run.save(tmp_path).wait()
    expected = {path: numbers(array) for path, array in run.arrays().items()}
    restored = spanax.restore(run.program, run.plan, tmp_path)
    arrays = {path: numbers(array) for path, array in restored.arrays().items()}
    assert arrays.keys() == expected.keys()
    assert not [path for path in RAW if not np.array_equal(arrays[path], expected[path])]


def test_raw_weights_that_the_optimizer_trains_are_parameters() -> None:
    class Linear(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.w, self.b = jax.random.normal(rngs.params(), (16, 16)), jnp.zeros(16)
            self.mask = jnp.ones(16)

    is_weight = lambda path, value: path[-1] in ("w", "b")  # noqa: E731

    def train_step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        squares = lambda model: ((x @ model.w * model.mask + model.b - x) ** 2).mean()  # noqa: E731
        value, grads = nnx.value_and_grad(squares, argnums=nnx.DiffState(0, is_weight))(model)
        optimizer.update(model, grads)
        return value

    optimizer = lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=is_weight)  # noqa: E731
    program = spanax.trace(build=Linear, optimizer=optimizer, batch=BATCH, train_step=train_step)
    assert {leaf.path: leaf.kind for leaf in program.leaves if leaf.kind != "optimizer"} == {
        "b": "param", "mask": "other", "w": "param",
    }  # fmt: skip
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
    assert run.params()["w"].sharding.shard_shape((16, 16)) == (2, 16)
    first, last = (float(run.step(BATCH)["loss"]) for _ in range(2))
    assert last < first


def test_arrays_in_a_plain_list_are_refused_by_flax() -> None:
    class Listed(nnx.Module):
        def __init__(self) -> None:
            self.steps = [jnp.ones(3)]

    with pytest.raises(ValueError, match="Found data on value of type '<class 'list'>'"):
        spanax.trace(build=Listed, optimizer=optax.sgd(0.1), batch=BATCH, loss=loss)


def test_raw_arrays_of_layers_are_stacked() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear, self.scale = nnx.Linear(16, 16, rngs=rngs), jnp.full(16, 0.5)
            self.noise = jax.random.normal(rngs.params(), (16,))

    class Layers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.vmap(Layer)(rngs.split(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            run = lambda layer, x: layer.linear(x) * layer.scale + layer.noise  # noqa: E731
            return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)

    program = spanax.trace(build=Layers, optimizer=optax.sgd(0.1), batch=BATCH, loss=loss)
    shapes = {leaf.path: leaf.shape for leaf in program.leaves if leaf.kind == "other"}
    assert shapes == {"layers.noise": (3, 16), "layers.scale": (3, 16)}
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
    assert len(np.unique(run.arrays()["layers.noise"])) == 48
    assert float(run.step(BATCH)["loss"]) > float(run.step(BATCH)["loss"])


def test_a_step_may_stash_a_traced_value() -> None:
    class Stashing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            self.last = self.linear(x)
            return self.last

    program = spanax.trace(build=Stashing, optimizer=optax.sgd(0.1), batch=BATCH, loss=loss)
    assert [leaf.path for leaf in program.leaves] == ["linear.bias", "linear.kernel", "optimizer.step"]
