"""Gradients that devices divide among them instead of repeating them, next to programs compiled for v5e:2x4."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from spanax.hardware.mesh import MeshShape
from spanax.plan.presets import layout_named
from spanax.plan.sharding.resolve import resolve
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram

BATCH, WIDTH = 64, 64


class Net(nnx.Module):
    """A layer that no axis of tensor parallelism shards, and a head."""

    def __init__(self, rngs: nnx.Rngs, features: int):
        self.enter = nnx.Linear(WIDTH, features, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(self.enter(x))


def counted(sizes: str, features: int, *, is_tpu_program: bool) -> tuple[float, dict[tuple[str, str], float]]:
    program = spanax.trace(
        build=lambda rngs: Net(rngs, features), optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"), loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    mesh = MeshShape.of(sizes)
    sharded = ShardedProgram(resolve(program, layout_named("fsdp", MeshShape.of("fsdp=2")), mesh, {}), program.step)
    terms = count_terms(sharded, is_tpu_program=is_tpu_program)
    return float((terms.matmuls.flops * terms.matmuls.runs).sum()), terms.moved_bytes(mesh)


@pytest.mark.parametrize("sizes, is_divided", [("fsdp=2,model=4", True), ("fsdp=4,model=2", False), ("fsdp=8", False)])
def test_a_repeated_gradient_is_divided_where_its_parts_divide_the_devices(sizes: str, is_divided: bool) -> None:
    (before, _), (after, moved) = (counted(sizes, WIDTH, is_tpu_program=is_tpu) for is_tpu in (False, True))
    gradient, matmul = 4 * WIDTH * WIDTH, 2 * BATCH * WIDTH * WIDTH
    assert before - after == (matmul / 2 if is_divided else 0)  # of the forward matmul and that of the gradient
    if is_divided:
        assert moved["collective-permute", "fsdp+model"] == gradient / 2
        assert ("reduce-scatter", "fsdp") not in moved
    else:
        assert ("collective-permute", "fsdp+model") not in moved


def test_the_gradient_of_a_vector_is_not_divided() -> None:
    _, moved = counted("fsdp=2,model=4", 1, is_tpu_program=True)
    assert ("collective-permute", "fsdp+model") not in moved
