"""Deferred reductions: which all-reduces a loop can defer, and which it cannot."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
import zoo
from sampling import sampled
from spanax.plan.evaluate import evaluate
from spanax.plan.place import resolver_of
from spanax.plan.spmd.deferred_reductions import DeferredReductions, unreduced
from spanax.plan.spmd.sharded_program import ShardedProgram

BATCH = jax.ShapeDtypeStruct((32, 16), "float32")
MESH = "data=4,model=2"


def put_off(program: spanax.Program, mesh: str = MESH, layout: str | None = None) -> DeferredReductions:
    plan = spanax.plan(program, spanax.cluster("cpu:8"), mesh=mesh, layout=layout)
    return unreduced(ShardedProgram(resolver_of(program, plan), program.step), plan.schedule)


@functools.cache
def of_zoo(name: str, microbatches: int) -> spanax.Program:
    case = zoo.ZOO[name]
    return spanax.trace(
        build=case.build, optimizer=case.optimizer, batch=case.batch(32), loss=case.loss, microbatches=microbatches
    )


def stepping(turn: Callable[[Any, Any], Any]) -> spanax.Program:
    """A step of its own over parts of the batch; `turn` makes a new sum of the old one and a gradient."""

    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        graph, params = nnx.split(model)
        loss = lambda params, x: (nnx.merge(graph, params, copy=True)(x) ** 2).mean()  # noqa: E731
        each = lambda total, x: (jax.tree.map(turn, total, jax.grad(loss)(params, x)), None)  # noqa: E731
        total, _ = jax.lax.scan(each, jax.tree.map(jnp.zeros_like, params), batch.reshape(8, 4, 16).swapaxes(0, 1))
        optimizer.update(model, total)
        return {}

    return spanax.trace(
        build=lambda rngs: nnx.Linear(16, 32, use_bias=False, rngs=rngs),
        optimizer=optax.sgd(0.1), batch=BATCH, train_step=step,
    )  # fmt: skip


@pytest.mark.parametrize("name", sampled(["gpt", "gpt-unrolled", "dropout", "moe", "lora"], ["gpt", "moe"]))
def test_gradients_of_a_microbatch_loop_are_reduced_after_it(name: str) -> None:
    program = of_zoo(name, 2)
    result = put_off(program, layout="data+tensor")
    assert set(result.ends.values()) == {("data",)}
    assert len(result.ends) == sum(leaf.kind == "param" for leaf in program.leaves)


def test_without_a_loop_no_sum_is_deferred() -> None:
    assert not put_off(of_zoo("gpt", 1)).ends


def test_a_gradient_stored_sharded_is_not_deferred() -> None:
    result = put_off(of_zoo("mlp", 2), "data=2,fsdp=4", "hsdp")
    assert set(result.ends.values()) == {("data",)}  # over fsdp it would take all of the gradients on every device
    assert put_off(of_zoo("mlp", 2), "fsdp=8", "zero2").ends.keys() == set()


@pytest.mark.parametrize(
    ("turn", "is_put_off"),
    [
        (lambda total, grad: total + grad, True),
        (lambda total, grad: 0.9 * total + (grad * 3).astype("bfloat16").astype("float32"), True),
        (lambda total, grad: total - jnp.concatenate([grad[:8], jnp.zeros_like(grad[8:])]), True),
        (lambda total, grad: total + grad * jnp.abs(grad), False),
        (lambda total, grad: total + grad / (1 + total), False),
        (lambda total, grad: total * grad, False),
        (lambda total, grad: jnp.maximum(total, grad), False),
        (lambda total, grad: total + jnp.clip(grad, -1, 1), False),
    ],
)
def test_only_linear_functions_of_a_sum_are_deferred(turn: Callable[[Any, Any], Any], is_put_off: bool) -> None:
    assert bool(put_off(stepping(turn), "data=8", "data").ends) is is_put_off


@pytest.mark.parametrize("microbatches", [2, 4])
def test_gradients_are_reduced_once_per_step_for_any_number_of_microbatches(microbatches: int) -> None:
    program, cluster = of_zoo("gpt", microbatches), spanax.cluster("cpu:8")
    cost = evaluate(program, spanax.plan(program, cluster, mesh="data=8", layout="data"), cluster)
    losses = 4 * microbatches  # the metric of each microbatch, a single number
    assert cost.collectives == {"data": {"all-reduce": 4 * program.num_params + losses}}
