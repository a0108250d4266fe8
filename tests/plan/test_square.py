"""Weights from an axis to itself: a tensor layout shards the dim they sum over, and the stream between them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.trace.program import Program


class Looped(nnx.Module):
    """One square kernel per layer, in a scan whose carry ties what goes in to what comes out."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=(0,))
        self.kernel = nnx.Param(init(rngs.params(), (3, 32, 32)))
        self.bias = nnx.Param(jnp.zeros((3, 32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            kernel, bias = weights
            return jnp.tanh(x @ kernel + bias), None

        return jax.lax.scan(layer, x, (self.kernel[...], self.bias[...]))[0]


@pytest.fixture(scope="module")
def program() -> Program:
    return spanax.trace(
        build=Looped, optimizer=optax.adam(1e-2, eps=1e-3), batch=jax.ShapeDtypeStruct((16, 32), "float32"),
        loss=lambda model, x: jnp.mean((model(x) - x) ** 2),
    )  # fmt: skip


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(("layout", "mesh"), [("fsdp+tensor", "fsdp=4,model=2"), ("tensor", "model=8")])
def test_square_weights_are_sharded_with_the_losses_of_one_device(program: Program, layout: str, mesh: str) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 16, 32)).astype("float32")
    plan = spanax.plan(program, "cpu:8", layout=layout, mesh=mesh)
    assert plan["kernel"].spec[1] == ("model",) and plan["kernel"].local_bytes * 8 == 3 * 32 * 32 * 4

    def losses(run: spanax.Run) -> list[float]:
        return [float(run.step(batch)["loss"]) for batch in rows]

    one_device = spanax.start(program, spanax.plan(program, "cpu:1", layout="data"))
    np.testing.assert_allclose(losses(spanax.start(program, plan)), losses(one_device), rtol=1e-5)
