"""Assign: which classes of dims each mesh axis shards, and why others stay replicated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from programs import small_gpt
from spanax.errors import IdleAxisError, SpanaxError
from spanax.hardware.mesh import MeshShape
from spanax.plan.advice.rules_of_thumb import rule
from spanax.plan.candidate import plan_of
from spanax.plan.layout import Layout
from spanax.plan.presets import layout_named
from spanax.plan.reason import Code
from spanax.plan.sharding.assign import Assignment, assign, pinned
from spanax.plan.sharding.resolve import resolve
from spanax.trace.program import Program


def assigned(program: Program, layout: str, mesh: str) -> Assignment:
    shape = MeshShape.of(mesh)
    return assign(program, layout_named(layout, shape), shape, {})


def names(program: Program, assignment: Assignment, axis: str) -> set[str]:
    return {program.step.axes.names[label] for label in assignment.ranks[axis]}


def traced(build: Callable[[nnx.Rngs], nnx.Module], width: int) -> Program:
    return spanax.trace(
        build=build, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((8, width), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip


def layers(rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(
        nnx.Linear(16, 32, rngs=rngs), jnp.tanh, nnx.Linear(32, 64, rngs=rngs), jnp.tanh, nnx.Linear(64, 16, rngs=rngs)
    )


def test_the_model_axis_shards_one_dim_of_each_weight() -> None:
    program = traced(layers, 16)
    assignment = assigned(program, "data+tensor", "data=2,model=2")
    assert names(program, assignment, "data") == {"batch"}
    for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False):
        labels = program.step.axes.classes[value]
        assert leaf.kind != "param" or sum(label in assignment.ranks["model"] for label in labels) <= 1, leaf.path
    assert {reason.code for reason in assignment.reasons.values()} == {Code.AXIS_USED}


def test_a_mesh_axis_of_one_device_shards_nothing() -> None:
    assert set(assigned(small_gpt(), "data+tensor", "data=1,model=2").ranks) == {"model"}


def test_a_dim_that_is_not_divisible_is_a_reason() -> None:
    program = small_gpt()
    size = next(axis.ways for axis in program.axes if axis.name == "heads")
    assignment = assigned(program, "tensor", f"model={2 * size}")
    (reason,) = {reason for reason in assignment.reasons.values() if reason.name == "heads"}
    assert (reason.code, reason.size, reason.num_shards) == (Code.NOT_DIVISIBLE, size, 2 * size)
    assert "heads" not in names(program, assignment, "model")


class Fused(nnx.Module):
    """Three projections in one matmul, of which the last is the mean: its features have three shards at most."""

    def __init__(self, rngs: nnx.Rngs):
        self.qkv, self.out = nnx.Linear(32, 192, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = self.qkv(x).reshape(-1, 3, 64).mean(1)
        return self.down(nnx.gelu(self.up(x + self.out(mean))))


def test_an_axis_of_last_resort_that_is_not_divisible_is_a_reason() -> None:
    plan = spanax.plan(traced(Fused, 32), "cpu:8", mesh="data=2,model=4")
    assert plan["qkv.kernel"].spec == ((), ()) and plan["out.kernel"].spec == (("model",), ())
    assert "features (3) is not divisible by 4" in plan["qkv.kernel"].reason


def test_a_batch_that_is_not_divisible_raises() -> None:
    with pytest.raises(SpanaxError, match="'batch' of size 16 is not divisible by 3: 16 % 3 = 1"):
        assigned(small_gpt(), "data", "data=3")


def test_a_mesh_axis_without_work_raises() -> None:
    with pytest.raises(IdleAxisError, match=r"mesh axis 'model' \(4\) has nothing to shard"):
        assigned(traced(lambda rngs: nnx.Linear(6, 6, rngs=rngs), 6), "tensor", "model=4")


def test_a_pin_moves_an_axis_to_another_mesh_axis() -> None:
    mesh = MeshShape.of("data=2,model=2")
    layout = layout_named("data+tensor", mesh)
    by_axis = dict(pinned(layout, {"mlp": "data"}, small_gpt(), mesh).computed)
    assert by_axis["data"] == ("mlp", "batch") and "mlp" not in by_axis["model"]
    assert "mlp" not in dict(pinned(layout, {"mlp": None}, small_gpt(), mesh).computed)["model"]
    with pytest.raises(SpanaxError, match="cannot pin 'mlp' to mesh axis 'pipe'"):
        pinned(layout, {"mlp": "pipe"}, small_gpt(), mesh)


@pytest.mark.parametrize(
    ("examples", "pins", "act", "is_sharded"),
    [
        (16, {}, jax.nn.gelu, True),
        (512, {}, jax.nn.gelu, False),  # activations are larger than weights
        (16, {"hidden": None}, jax.nn.gelu, False),
        (16, {}, jax.nn.softmax, False),  # a row of activations is computed as one
    ],
)
def test_a_hidden_class_is_sharded_where_its_activations_are_smaller_than_its_weights(
    examples: int, pins: dict[str, None], act: Any, is_sharded: bool
) -> None:
    def build(rngs: nnx.Rngs) -> nnx.Sequential:
        return nnx.Sequential(nnx.Linear(32, 128, rngs=rngs), act, nnx.Linear(128, 64, rngs=rngs))

    def loss(model: nnx.Sequential, batch: dict[str, jax.Array]) -> jax.Array:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    batch = {name: jax.ShapeDtypeStruct((examples, size), "float32") for name, size in (("x", 32), ("y", 64))}
    program = spanax.trace(build=build, optimizer=optax.sgd(0.1), batch=batch, loss=loss)
    mesh = MeshShape.of("fsdp=4")
    resolver = resolve(program, layout_named("fsdp", mesh), mesh, pins)
    classes = program.step.axes.classes
    hidden = [value for value, labels in enumerate(classes) if program.step.graph.shape(value) == (examples, 128)]
    expected = ((), ("fsdp",)) if is_sharded else (("fsdp",), ())
    found = {resolver.constraints(program.step)[value].spec for value in hidden}
    assert hidden and found == {expected}


def test_uneven_stages_are_padded() -> None:
    program, mesh = small_gpt(num_layers=3), MeshShape.of("pipe=2")
    assignment = assign(program, Layout("stages", computed=(("pipe", ("layers",)),)), mesh, {})
    ((label, parts),) = assignment.parts.items()
    assert (parts.num_layers, parts.num_parts, assignment.padded_size(label, 3)) == (3, 2, 4)
    assert assignment.padded_size(label, 5) == 5 and assignment.padded_size(None, 3) == 3


class Grouped(nnx.Module):
    """The mean of each group of four examples, combined with all examples."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 256, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.linear(x)
        means = x[:, 0].reshape(-1, 4).mean(1)
        return jnp.tanh(means[:, None, None] * x)


def test_a_value_with_two_batch_dims_is_sharded_along_the_divisible_dim() -> None:
    program = spanax.trace(
        build=Grouped, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((16, 8), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    mesh = MeshShape.of("data=8")
    constraints = resolve(program, layout_named("data", mesh), mesh, {}).constraints(program.step)
    large = [constraints[value] for value in range(len(constraints)) if program.step.graph.shape(value) == (4, 16, 256)]
    assert large and all(each is not None and each.spec == ((), ("data",), ()) for each in large)


class Residual(nnx.Module):
    """A square layer whose output is added to its input, between two other layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(32, 96, rngs=rngs)
        self.block = nnx.Linear(96, 96, rngs=rngs)
        self.last = nnx.Linear(96, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.first(x)
        return self.last(hidden + nnx.gelu(self.block(hidden)))


def test_a_class_along_both_dims_of_a_kernel_is_the_reason_that_none_is_sharded() -> None:
    plan = spanax.plan(traced(Residual, 32), "cpu:8", mesh="data=2,model=4")
    reason = "'model' does not shard hidden: it would shard two dims of block.kernel"
    assert [plan[path].spec for path in ("block.kernel", "first.bias")] == [((), ()), ((),)]
    assert {plan[path].reason for path in ("block.kernel", "first.bias", "last.kernel")} == {reason}


def test_the_rule_of_a_layout_names_axes_where_few_parameters_are_sharded() -> None:
    program = traced(Residual, 32)
    result = spanax.search(program, "cpu:8", layout="tensor")
    assert result.best is not None
    text = rule(result, result.best, plan_of(result, result.best))
    assert text.endswith("features (29 % of the parameters) are sharded over model=8, inside a node")
    result = spanax.search(traced(layers, 16), "cpu:8", layout="tensor")
    assert result.best is not None
    text = rule(result, result.best, plan_of(result, result.best))
    assert text.endswith("; layers are sharded over model=8, inside a node")
