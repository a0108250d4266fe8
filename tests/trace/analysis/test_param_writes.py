"""Written: a loss that puts something in the place of a parameter is followed, and NNX's loops are seen through."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import SpanaxError
from spanax.trace.rewrites.pure_loss import param_writes


class Clipped(nnx.Module):
    """Weights that the forward pass keeps small."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.linear.kernel
        kernel[...] = jnp.clip(kernel[...], -0.1, 0.1)
        return self.linear(x)


def traced(build: Any, **options: Any) -> spanax.Program:
    return spanax.trace(
        build=build, optimizer=optax.sgd(0.01), batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        loss=lambda model, x: jnp.square(model(x)).mean(), **options,
    )  # fmt: skip


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("options", [{}, {"compute_dtype": "bfloat16"}, {"remat": "dots"}])
def test_the_optimizer_updates_parameters_written_by_the_loss(options: dict[str, Any]) -> None:
    program = traced(Clipped, **options)
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:2"), layout="fsdp"))
    assert jnp.abs(run.params()["linear.kernel"]).max() > 0.2
    run.step(jnp.ones((8, 8)))
    assert jnp.abs(run.params()["linear.kernel"]).max() < 0.15


def test_microbatches_that_write_to_parameters_raise() -> None:
    with pytest.raises(SpanaxError, match="writes to the parameter `linear.kernel`; 4 microbatches"):
        traced(Clipped, microbatches=4)


class Lazy(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.late = nnx.Param(jnp.ones(8))
        return x * self.late


def test_a_parameter_created_after_build_raises() -> None:
    with pytest.raises(SpanaxError, match="how many parameters there are: 0 arrays before, 1 after"):
        traced(lambda: Lazy())


class Looped(nnx.Module):
    """NNX's loop returns all of its arguments, stacked again."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))
        return nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def test_a_loop_without_writes_supports_microbatches() -> None:
    traced(Looped, microbatches=4)


@pytest.mark.usefixtures("devices")
def test_a_loop_that_writes_is_detected() -> None:
    def after(leaves: Any) -> Any:
        turned = jax.lax.scan(lambda carry, row: (carry, (row[0], row[1] + 1)), 0, leaves[:2])[1]
        swapped = jax.lax.scan(lambda pair, _: ((pair[1], pair[0]), None), tuple(leaves[2:]), None, length=3)[0]
        return [*turned, *swapped]

    rows = jnp.ones((3, 4))
    assert param_writes(after, [rows, rows, rows, rows]) == [False, True, True, True]
