"""A moving average as an `nnx.State` or as Variables next to an optimizer equals that of `nnx.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax

X = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.relu(self.up(x)))


def params(model: Model) -> nnx.State[Any, Any]:
    return jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))


def without_type(model: Model) -> Any:
    flat = nnx.to_flat_state(params(model))
    return nnx.from_flat_state([(path, nnx.Variable(param.get_value())) for path, param in flat])


def averaged(average: Any, value: Any) -> Any:
    return 0.9 * average + 0.1 * value


def returned(model: Model, average: Any) -> Any:
    return jax.tree.map(averaged, average, nnx.state(model, nnx.Param))


def in_place(model: Model, average: Any) -> Any:
    pairs = zip(nnx.to_flat_state(average), nnx.to_flat_state(nnx.state(model, nnx.Param)), strict=True)
    for (_, old), (_, new) in pairs:
        old[...] = averaged(old[...], new[...])
    return average


def kernel_in_place(model: Model, average: Any) -> Any:
    average[...] = averaged(average[...], model.up.kernel[...])
    return average


CASES: dict[str, tuple[Callable[[Model], Any], Callable[[Model, Any], Any]]] = {
    "a State that is returned": (params, returned),
    "a State that is updated in place": (params, in_place),
    "a State of nnx.Variable": (without_type, in_place),
    "an nnx.Param": (lambda model: nnx.Param(jnp.copy(model.up.kernel[...])), kernel_in_place),
    "an nnx.Variable": (lambda model: nnx.Variable(jnp.copy(model.up.kernel[...])), kernel_in_place),
}


def trained(transform: Callable[..., Any], name: str) -> tuple[list[float], list[Any], Any, Any]:
    """Three losses, the arrays of the average after them, the model, and the function."""
    make, update = CASES[name]
    model, losses = Model(), []
    optimizer, average = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), make(model)

    @transform
    def step(model: Any, optimizer: Any, average: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss, update(model, average)

    for _ in range(3):
        loss, average = step(model, optimizer, average, X)
        losses.append(float(loss))
    return losses, jax.tree.leaves(average), model, step


@pytest.mark.parametrize("name", CASES)
def test_an_average_equals_that_of_one_device_and_is_sharded_like_the_parameters(name: str) -> None:
    losses, arrays, model, step = trained(spanax.jit(mesh="fsdp=4,model=2"), name)
    expected_losses, expected, _, _ = trained(nnx.jit, name)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for array, expected_array in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(array, expected_array, rtol=1e-5, atol=1e-6)
    mirrored = jax.tree.leaves(nnx.state(model)) if "State" in name else [model.up.kernel[...]]
    assert [array.sharding.spec for array in arrays] == [array.sharding.spec for array in mirrored]
    assert all(array.sharding.spec != jax.P() for array in arrays)
    assert step.num_compilations == 1
